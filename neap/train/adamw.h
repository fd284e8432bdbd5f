// AdamW (Loshchilov and Hutter, 2019) on PyTorch's fused operator: one call updates every parameter in place.
//
// The arithmetic is that of torch.optim.AdamW(fused=True), state for state; against the unfused classes it agrees
// within rounding, since the fused kernel associates differently. All states are allocated by the constructor, so that
// a run that will not fit says so before its first step. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/train/config.h"

namespace neap::train {

class AdamW {
 public:
  struct Options {
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1;
    Decay decay = Decay::kAll;
  };

  // The states lie on the parameters' device, in their dtype. A parameter listed twice counts once; one that requires
  // no gradient is left out.
  // `dimensions`: how many each parameter has as a whole, where it is but a piece here (neap/shard) and does not show
  // it; empty: its own.
  AdamW(const std::vector<at::Tensor>& parameters, Options options, const std::vector<int64_t>& dimensions = {});

  // One update with the gradients that are there; a parameter without one is not touched, and its step count stays.
  void step(double lr);
  // Drops the gradients' memory.
  void zero_grad();

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  Bytes state_bytes() const;

  struct State {
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor step;  // float32 scalar
  };
  // In the order of parameters().
  const std::vector<State>& states() const noexcept { return states_; }

 private:
  Options options_;
  std::vector<at::Tensor> parameters_;
  std::vector<bool> decays_;  // one per parameter
  std::vector<State> states_;
};

}  // namespace neap::train
