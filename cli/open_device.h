// Makes the device of a run file usable: loads and configures the simulator, or checks that the hardware is there.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

#include "neap/train/config.h"

namespace neap::trace {
class Recorder;
}

namespace neap::cli {

struct OpenDevice {
  c10::Device device;
  bool has_clock = false;  // a clock of its own, set with device::set_clock
};

// With a simulated device: connects its clock to the device layer and `recorder` (may be null) to its kernels, copies,
// waits and memory. UserError when the device does not exist.
OpenDevice open_device(const train::DeviceSection& section, trace::Recorder* recorder);

// What a recorder's times are where the device has a clock of its own; empty: the host's. Asked once the device is
// open.
std::function<int64_t()> trace_clock(const train::DeviceSection& section);

// Prints what the hazard checker found, and says whether there was anything.
bool report_hazards(const train::DeviceSection& section);

}  // namespace neap::cli
