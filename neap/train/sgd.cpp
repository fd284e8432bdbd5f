#include "neap/train/sgd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros_like.h>

namespace neap::train {

Sgd::Sgd(const std::vector<at::Tensor>& parameters, Options options, const std::vector<int64_t>& dimensions)
    : Optimizer(parameters, options.decay, dimensions), options_(options) {
  if (options_.momentum == 0) return;
  for (const at::Tensor& parameter : this->parameters()) {
    momenta_.push_back(at::zeros_like(parameter.detach(), at::MemoryFormat::Preserve));
  }
}

void Sgd::step(double lr) {
  const at::NoGradGuard no_grad;
  for_each_group([&](const std::vector<size_t>& indices, bool decays) {
    std::vector<at::Tensor> values, gradients, momenta;
    for (const size_t i : indices) {
      values.push_back(parameters()[i]);
      gradients.push_back(parameters()[i].grad());
      if (!momenta_.empty()) momenta.push_back(momenta_[i]);
    }
    at::_fused_sgd_(values, gradients, momenta, decays ? options_.weight_decay : 0, options_.momentum, lr,
                    /*dampening=*/0, options_.nesterov, /*maximize=*/false, /*is_first_step=*/false);
  });
}

Optimizer::NamedState Sgd::state_of(size_t i) const {
  if (momenta_.empty()) return {};
  return {{"momentum_buffer", momenta_[i]}};
}

}  // namespace neap::train
