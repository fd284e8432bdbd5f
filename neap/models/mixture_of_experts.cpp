#include "neap/models/mixture_of_experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "neap/models/internal/hand_written.h"

namespace neap::models {

Router::Router(const ModelConfig& config, at::TensorOptions options)
    : weight(register_parameter("weight", at::empty({config.experts.value().count, config.hidden_size}, options))),
      e_score_correction_bias(
          register_buffer("e_score_correction_bias", at::zeros({config.experts->count}, options.dtype(at::kFloat)))),
      config_(*config.experts) {}

void Router::place_buffers(c10::Device device) {
  // A tensor of the meta device cannot become one of another, so it is replaced.
  e_score_correction_bias = at::zeros({config_.count}, at::TensorOptions().device(device).dtype(at::kFloat));
}

Router::Choice Router::forward(const at::Tensor& tokens) const {
  const at::ScalarType wide = internal::wide_type(tokens.scalar_type());
  const at::Tensor scores = at::linear(tokens.to(wide), weight.to(wide)).sigmoid();
  const at::Tensor experts = choose(scores);
  at::Tensor weights = scores.gather(1, experts);
  if (config_.norm_topk_prob) weights = weights / (weights.sum(-1, /*keepdim=*/true) + 1e-20);
  return {weights * config_.routed_scaling_factor, experts};
}

at::Tensor Router::choose(const at::Tensor& scores) const {
  const at::NoGradGuard no_grad;
  at::Tensor biased = scores + e_score_correction_bias;
  if (config_.groups_per_token < config_.groups) {
    const at::Tensor grouped = biased.view({biased.size(0), config_.groups, -1});
    const at::Tensor best_two = std::get<0>(grouped.topk(2)).sum(-1);
    const at::Tensor best =
        std::get<1>(best_two.topk(config_.groups_per_token, -1, /*largest=*/true, /*sorted=*/false));
    const at::Tensor open = at::zeros_like(best_two, at::kBool).scatter_(1, best, true);
    biased = grouped.masked_fill(open.logical_not().unsqueeze_(-1), -std::numeric_limits<double>::infinity())
                 .view(biased.sizes());
  }
  return std::get<1>(biased.topk(config_.per_token, -1, /*largest=*/true, /*sorted=*/false));
}

Experts::Experts(const ModelConfig& config, at::TensorOptions options) {
  const ExpertsConfig& experts = config.experts.value();
  const int64_t size = experts.intermediate_size;
  gate_up_proj = register_parameter("gate_up_proj", at::empty({experts.count, 2 * size, config.hidden_size}, options));
  down_proj = register_parameter("down_proj", at::empty({experts.count, config.hidden_size, size}, options));
}

MixtureOfExperts::MixtureOfExperts(const ModelConfig& config, at::TensorOptions options)
    : gate_(register_module("gate", std::make_shared<Router>(config, options))),
      experts_(register_module("experts", std::make_shared<Experts>(config, options))),
      shared_experts_(register_module(
          "shared_experts",
          std::make_shared<Mlp>(config.hidden_size, config.experts->shared * config.experts->intermediate_size,
                                /*with_bias=*/false, options))),
      load_(static_cast<std::size_t>(config.experts->count), 0) {}

at::Tensor MixtureOfExperts::body(const at::Tensor& x) const {
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  const Router::Choice choice = gate_->forward(tokens);
  const Dispatch routes = dispatch(choice.experts, gate_->weight.size(0));
  if (at::GradMode::is_enabled() && !autograd::running_again()) count(routes.counts);
  const at::Tensor routed = routed_experts(tokens, choice.weights, experts_->gate_up_proj, experts_->down_proj, routes);
  return routed.view(x.sizes()) + shared_experts_->forward(x);
}

void MixtureOfExperts::count(const std::vector<int64_t>& load) const {
  const MutexLock lock(mutex_);
  std::ranges::transform(load_, load, load_.begin(), std::plus<>());
}

std::vector<int64_t> MixtureOfExperts::take_load() {
  const MutexLock lock(mutex_);
  return std::exchange(load_, std::vector<int64_t>(load_.size(), 0));
}

}  // namespace neap::models
