#include "neap/models/latent_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <cmath>

#include "neap/base/error.h"

namespace neap::models {
namespace {

// Of the norms of the latents, whatever config.rms_norm_eps is: so has it the published model, and transformers.
constexpr double kLatentEps = 1e-6;

// Zeros behind the elements of each head.
at::Tensor padded(const at::Tensor& x, int64_t size) {
  return x.size(-1) == size ? x : at::constant_pad_nd(x, {0, size - x.size(-1)}, 0);
}

}  // namespace

LatentAttention::LatentAttention(const ModelConfig& config, at::TensorOptions options)
    : config_(config.latent_attention.value()),
      heads_(config.num_attention_heads),
      scale_(config.rope_scaling.softmax_factor() / std::sqrt(static_cast<double>(config_.qk_head_dim()))) {
  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, std::make_shared<Linear>(in, out, bias, options));
  };
  const auto norm = [&](const char* name, int64_t size) {
    return register_module(name, std::make_shared<RmsNorm>(size, kLatentEps, options));
  };
  const int64_t hidden = config.hidden_size;
  const int64_t query_size = heads_ * config_.qk_head_dim();
  if (config_.q_lora_rank) {
    q_a_proj_ = linear("q_a_proj", hidden, *config_.q_lora_rank, config.qkv_bias);
    q_a_layernorm_ = norm("q_a_layernorm", *config_.q_lora_rank);
    q_b_proj_ = linear("q_b_proj", *config_.q_lora_rank, query_size, false);
  } else {
    q_proj_ = linear("q_proj", hidden, query_size, false);
  }
  kv_a_proj_with_mqa_ =
      linear("kv_a_proj_with_mqa", hidden, config_.kv_lora_rank + config_.qk_rope_head_dim, config.qkv_bias);
  kv_a_layernorm_ = norm("kv_a_layernorm", config_.kv_lora_rank);
  kv_b_proj_ =
      linear("kv_b_proj", config_.kv_lora_rank, heads_ * (config_.qk_nope_head_dim + config_.v_head_dim), false);
  o_proj_ = linear("o_proj", heads_ * config_.v_head_dim, hidden, config.output_bias);
}

at::Tensor LatentAttention::queries(const at::Tensor& x) const {
  if (q_proj_) return q_proj_->forward(x);
  return q_b_proj_->forward(q_a_layernorm_->forward(q_a_proj_->forward(x)));
}

at::Tensor LatentAttention::body(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                                 const at::Tensor& mask) const {
  const RotaryTables rotary{cos, sin};
  const RotaryPairs pairs = config_.rope_interleave ? RotaryPairs::kNeighbours : RotaryPairs::kHalves;
  const int64_t batch = x.size(0), sequence = x.size(1);
  const int64_t nope = config_.qk_nope_head_dim, rope = config_.qk_rope_head_dim;
  const auto heads = [&](const at::Tensor& projected) { return projected.view({batch, sequence, heads_, -1}); };

  const at::Tensor query = apply_rotary(heads(queries(x)), rotary, pairs);
  const at::Tensor down = kv_a_proj_with_mqa_->forward(x);
  const at::Tensor latent = down.narrow(-1, 0, config_.kv_lora_rank);
  const at::Tensor position = down.narrow(-1, config_.kv_lora_rank, rope).unsqueeze(2);  // of one head, for all
  const at::Tensor both = heads(kv_b_proj_->forward(kv_a_layernorm_->forward(latent)));
  const at::Tensor shared = apply_rotary(position, rotary, pairs).expand({batch, sequence, heads_, rope});
  const at::Tensor key = at::cat({both.narrow(-1, 0, nope), shared}, -1);
  const at::Tensor value = both.narrow(-1, nope, config_.v_head_dim);

  // Fused kernels want one size of head. With another, the probabilities would lie in memory, [sequence, sequence] of
  // each head; the zeros change neither scores nor sums.
  const int64_t size = std::max(config_.qk_head_dim(), config_.v_head_dim);
  const auto operand = [&](const at::Tensor& t) { return padded(t, size).transpose(1, 2); };
  const at::Tensor mixed = attend(operand(query), operand(key), operand(value), mask, scale_, /*grouped=*/false);
  const at::Tensor tokens = mixed.narrow(-1, 0, config_.v_head_dim).transpose(1, 2);
  return o_proj_->forward(tokens.reshape({batch, sequence, heads_ * config_.v_head_dim}));
}

}  // namespace neap::models
