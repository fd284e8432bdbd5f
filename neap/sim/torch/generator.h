// Random numbers of the device: one default generator per device, each over a CPU generator (its twin) that the CPU's
// kernels are handed. Thread-safe as torch's generators are: the twin's mutex guards it.
#pragma once

#include <ATen/core/Generator.h>

namespace neap::sim {

const at::Generator& default_generator(int device);
at::Generator make_generator(int device);

// REQUIRES: `generator` is one of ours.
at::Generator cpu_twin(const at::Generator& generator);

}  // namespace neap::sim
