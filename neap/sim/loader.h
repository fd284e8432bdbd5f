// torch-free
// Makes the simulated accelerator part of this process. It is a library of its own that is never linked: registering it
// decides which accelerator autograd asks for streams, so only a program that wants it may load it.
#pragma once

#include <filesystem>

#include "neap/sim/control.h"

namespace neap::sim {

inline constexpr const char* kLibraryVariable = "NEAP_SIM_LIBRARY";

// Loads libneap_sim.so on the first call, and configures the device from NEAP_SIM if that is set. The library is the
// one that NEAP_SIM_LIBRARY names; else it lies beside the program or library this function is part of, or in lib or
// ../lib of that; else it is the one this function was built with. UserError when there is none, when it belongs to
// another version, or when the process already runs another accelerator. Thread-safe.
Control& load();

// The same from one given file, without regard to the environment. Each file is loaded once.
Control& load_library(const std::filesystem::path& file);

}  // namespace neap::sim
