// Scaled dot-product attention with the memory of a fused kernel: the CPU's flash kernels, which keep the logsumexp
// and not the probabilities. Reached through ATen's "overrideable" backend, the one meant for devices outside ATen.
#include <ATen/core/grad_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

#include "neap/sim/torch/alias.h"
#include "neap/sim/torch/backend.h"

namespace neap::sim {
namespace {

using at::Tensor;

// Whatever the CPU would choose for the same tensors, so that both run the same arithmetic.
int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
               double dropout, bool causal, std::optional<double> scale, bool grouped_queries) {
  const bool recording = at::GradMode::is_enabled();
  const auto alias = [recording](const Tensor& t) {
    auto a = cpu_alias(t);
    return recording ? a.set_requires_grad(t.requires_grad()) : a;
  };
  const auto cpu_mask = mask && mask->defined() ? std::optional(alias(*mask)) : std::nullopt;
  const auto choice = at::native::_fused_sdp_choice_cpp(alias(query), alias(key), alias(value), cpu_mask, dropout,
                                                        causal, scale, grouped_queries);
  const bool flash = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return flash ? static_cast<int64_t>(at::SDPBackend::overrideable) : choice;
}

// The flash operators go through the dispatcher with sim tensors, i.e. through the fallback.
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attend(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, double dropout,
    bool causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale);
  return {output, logsumexp, Tensor(), Tensor(), query.size(2), key.size(2), Tensor(), Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4> /*grad_input_mask*/, const Tensor& output, const Tensor& logsumexp, const Tensor& /*cum_seq_q*/,
    const Tensor& /*cum_seq_k*/, c10::SymInt /*max_q*/, c10::SymInt /*max_k*/, double dropout, bool causal,
    const Tensor& /*philox_seed*/, const Tensor& /*philox_offset*/, std::optional<double> scale) {
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, logsumexp, dropout, causal, bias.defined() ? std::optional(bias) : std::nullopt,
      scale);
  return {grad_query, grad_key, grad_value, Tensor()};
}

}  // namespace

void register_attention(torch::Library& aten) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
  aten.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  aten.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
}

}  // namespace neap::sim
