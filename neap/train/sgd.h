// Stochastic gradient descent with momentum (Sutskever et al., 2013) on PyTorch's fused operator.
//
// The arithmetic is that of torch.optim.SGD(fused=True) without dampening. The running gradient starts as zero, which
// gives the bits of one that starts as the first gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "neap/train/optimizer.h"

namespace neap::train {

class Sgd : public Optimizer {
 public:
  struct Options {
    double momentum = 0;
    bool nesterov = false;
    double weight_decay = 0;  // added to the gradient
    Decay decay = Decay::kAll;
  };

  // Without momentum there is no state. Parameters and dimensions: see Optimizer.
  Sgd(const std::vector<at::Tensor>& parameters, Options options, const std::vector<int64_t>& dimensions = {});

  void step(double lr) override;
  NamedState state_of(size_t i) const override;

 private:
  Options options_;
  std::vector<at::Tensor> momenta_;  // in the order of parameters(), or empty
};

}  // namespace neap::train
