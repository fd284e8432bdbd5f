// torch-free
// What recomputation did in one step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "neap/base/bytes.h"

namespace neap::recompute {

struct StepReport {
  int64_t regions = 0;        // forward passes of units that kept nothing but their inputs
  int64_t reruns = 0;         // of these, how often one was run again for a backward pass
  int64_t saved_tensors = 0;  // tensors that autograd asked to keep and that were let go
  // The storages behind them, each once a region; parameters, buffers and the region's inputs do not count, for they
  // stay anyway.
  Bytes bytes_not_kept;
  std::vector<std::string> idle_units;  // attached, but no forward pass went through them

  // What is worth saying to the user, a sentence each; empty in a step as it should be.
  [[nodiscard]] std::vector<std::string> findings() const;
};

// One line for people.
std::string to_string(const StepReport& report);

}  // namespace neap::recompute
