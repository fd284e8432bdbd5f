#include "neap/train/adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace neap::train {

AdamW::AdamW(const std::vector<at::Tensor>& parameters, Options options, const std::vector<int64_t>& dimensions)
    : Optimizer(parameters, options.decay, dimensions), options_(options) {
  for (const at::Tensor& parameter : this->parameters()) {
    const at::Tensor values = parameter.detach();
    states_.push_back({.exp_avg = at::zeros_like(values, at::MemoryFormat::Preserve),
                       .exp_avg_sq = at::zeros_like(values, at::MemoryFormat::Preserve),
                       .step = at::zeros({}, values.options().dtype(at::kFloat))});
  }
}

void AdamW::step(double lr) {
  const at::NoGradGuard no_grad;
  for_each_group([&](const std::vector<size_t>& indices, bool decays) {
    std::vector<at::Tensor> values, gradients, exp_avgs, exp_avg_sqs, steps;
    for (const size_t i : indices) {
      values.push_back(parameters()[i]);
      gradients.push_back(parameters()[i].grad());
      exp_avgs.push_back(states_[i].exp_avg);
      exp_avg_sqs.push_back(states_[i].exp_avg_sq);
      steps.push_back(states_[i].step);
    }
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(values, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps, lr, options_.beta1,
                      options_.beta2, decays ? options_.weight_decay : 0, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  });
}

Optimizer::NamedState AdamW::state_of(size_t i) const {
  return {{"exp_avg", states_[i].exp_avg}, {"exp_avg_sq", states_[i].exp_avg_sq}, {"step", states_[i].step}};
}

}  // namespace neap::train
