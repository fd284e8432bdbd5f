#include "neap/train/adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <unordered_set>

#include "neap/base/error.h"

namespace neap::train {
namespace {

// What the fused operator takes for one group of parameters.
struct Group {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
};

}  // namespace

AdamW::AdamW(const std::vector<at::Tensor>& parameters, Options options, const std::vector<int64_t>& dimensions)
    : options_(options) {
  NEAP_ASSERT(dimensions.empty() || dimensions.size() == parameters.size(), dimensions.size(), " dimensions of ",
              parameters.size(), " parameters");
  std::unordered_set<const void*> seen;  // a tied weight is listed once per name
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameters_.push_back(parameter);
    decays_.push_back(options.decay == Decay::kAll || (dimensions.empty() ? parameter.dim() : dimensions[i]) >= 2);
    const at::Tensor values = parameter.detach();
    states_.push_back({.exp_avg = at::zeros_like(values, at::MemoryFormat::Preserve),
                       .exp_avg_sq = at::zeros_like(values, at::MemoryFormat::Preserve),
                       .step = at::zeros({}, values.options().dtype(at::kFloat))});
  }
}

void AdamW::step(double lr) {
  const at::NoGradGuard no_grad;
  Group decayed;
  Group plain;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.grad().defined()) continue;
    Group& group = decays_[i] ? decayed : plain;
    group.parameters.push_back(parameter);
    group.gradients.push_back(parameter.grad());
    group.exp_avgs.push_back(states_[i].exp_avg);
    group.exp_avg_sqs.push_back(states_[i].exp_avg_sq);
    group.steps.push_back(states_[i].step);
  }
  const auto update = [&](Group& group, double weight_decay) {
    if (group.parameters.empty()) return;
    at::_foreach_add_(group.steps, 1);
    at::_fused_adamw_(group.parameters, group.gradients, group.exp_avgs, group.exp_avg_sqs, /*max_exp_avg_sqs=*/{},
                      group.steps, lr, options_.beta1, options_.beta2, weight_decay, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  };
  update(decayed, options_.weight_decay);
  update(plain, 0);
}

void AdamW::zero_grad() {
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

Bytes AdamW::state_bytes() const {
  Bytes total;
  for (const State& state : states_) {
    total += Bytes(static_cast<int64_t>(state.exp_avg.nbytes() + state.exp_avg_sq.nbytes() + state.step.nbytes()));
  }
  return total;
}

}  // namespace neap::train
