// Trains a Llama on the simulated accelerator and measures each step on the virtual clock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "neap/offload/engine.h"
#include "neap/sim/control.h"

namespace neap::bench {

struct Workload {
  int64_t layers = 8, width = 512, heads = 8, mlp_width = 1408, vocabulary = 1024, batch = 2, sequence = 512;
};

// What the device is: GFLOP/s of its kernels, GB/s of its link in each direction.
struct Speeds {
  double gflops;
  double link_gbps;
};

struct Step {
  float loss = 0;
  int64_t activation_peak = 0;   // device bytes at the peak beyond what was there before the step
  int64_t left_over = 0;         // device bytes after the step beyond what was there before it
  int64_t ns = 0;                // virtual
  int64_t host_allocations = 0;  // of page-locked memory
  sim::Counters counters;
  std::optional<offload::StepReport> report;  // with offload
};

struct Training {
  std::vector<Step> steps;
  std::vector<at::Tensor> parameters;  // at the end, on the CPU
};

// Plain SGD inside backward: a gradient is applied and dropped as soon as it is there, as fused and sharded optimizers
// do, so that what is left at the peak are activations. No offload: no engine at all. A recorder gets the trace of the
// last step.
Training train_on_sim(const Workload& workload, Speeds speeds, int64_t steps,
                      const std::optional<offload::Options>& offload, trace::Recorder* recorder = nullptr);

// Bytes of the storages that autograd saves inside the decoder layers in one step, each counted once, without
// parameters and those under `min_bytes`. Counted apart from the engine, from addresses: in one forward none is reused.
int64_t eligible_bytes(const Workload& workload, int64_t min_bytes);

}  // namespace neap::bench
