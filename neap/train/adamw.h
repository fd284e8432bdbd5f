// AdamW (Loshchilov and Hutter, 2019) on PyTorch's fused operator: one call updates every parameter in place.
//
// The arithmetic is that of torch.optim.AdamW(fused=True), state for state; against the unfused classes it agrees
// within rounding, since the fused kernel associates differently.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "neap/train/optimizer.h"

namespace neap::train {

class AdamW : public Optimizer {
 public:
  struct Options {
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1;
    Decay decay = Decay::kAll;
  };

  // The states lie on the parameters' device, in their dtype. Parameters and dimensions: see Optimizer.
  AdamW(const std::vector<at::Tensor>& parameters, Options options, const std::vector<int64_t>& dimensions = {});

  // The step count of a parameter without a gradient stays.
  void step(double lr) override;

  struct State {
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor step;  // float32 scalar
  };
  // In the order of parameters().
  const std::vector<State>& states() const noexcept { return states_; }
  NamedState state_of(size_t i) const override;

 private:
  Options options_;
  std::vector<State> states_;
};

}  // namespace neap::train
