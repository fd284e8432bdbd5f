#include "neap/models/layers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>

namespace neap::models {

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
                  std::optional<double> scale, bool grouped) {
  const auto given = mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt;
  return at::scaled_dot_product_attention(query, key, value, given, /*dropout_p=*/0.0, /*is_causal=*/!given, scale,
                                          grouped);
}

Linear::Linear(int64_t in, int64_t out, bool with_bias, at::TensorOptions options)
    : weight(register_parameter("weight", at::empty({out, in}, options))) {
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor Linear::forward(const at::Tensor& x) const {
  const at::Tensor y = at::linear(x, weight, bias);
  return addition_ == nullptr ? y : addition_->add_to(y, x);
}

void Linear::set_addition(std::shared_ptr<const LinearAddition> addition,
                          const std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>& children) {
  for (const auto& [name, child] : children) register_module(name, child);
  addition_ = std::move(addition);
}

RmsNorm::RmsNorm(int64_t size, double eps, at::TensorOptions options)
    : weight(register_parameter("weight", at::empty({size}, options))), eps_(eps) {}

at::Tensor AttentionUnit::forward(const at::Tensor& x, const RotaryTables& rotary, const at::Tensor& mask) {
  return hook_point().run(*this, {x, rotary.cos, rotary.sin, mask}, &AttentionUnit::body);
}

at::Tensor FeedForwardUnit::forward(const at::Tensor& x) {
  return hook_point().run(*this, {x}, &FeedForwardUnit::body);
}

Attention::Attention(const ModelConfig& config, at::TensorOptions options)
    : head_dim_(config.head_dim), grouped_(config.num_key_value_heads != config.num_attention_heads) {
  const int64_t queries = config.num_attention_heads * head_dim_;
  const int64_t keys = config.num_key_value_heads * head_dim_;
  const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, std::make_shared<Linear>(in, out, bias, options));
  };
  q_proj_ = linear("q_proj", config.hidden_size, queries, config.qkv_bias);
  k_proj_ = linear("k_proj", config.hidden_size, keys, config.qkv_bias);
  v_proj_ = linear("v_proj", config.hidden_size, keys, config.qkv_bias);
  o_proj_ = linear("o_proj", queries, config.hidden_size, config.output_bias);
  if (!config.qk_norm) return;
  q_norm_ = register_module("q_norm", std::make_shared<RmsNorm>(head_dim_, config.rms_norm_eps, options));
  k_norm_ = register_module("k_norm", std::make_shared<RmsNorm>(head_dim_, config.rms_norm_eps, options));
}

at::Tensor Attention::body(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                           const at::Tensor& mask) const {
  const RotaryTables rotary{cos, sin};
  const int64_t batch = x.size(0);
  const int64_t sequence = x.size(1);
  const auto heads = [&](const at::Tensor& projected) { return projected.view({batch, sequence, -1, head_dim_}); };
  at::Tensor query = heads(q_proj_->forward(x));
  at::Tensor key = heads(k_proj_->forward(x));
  const at::Tensor value = heads(v_proj_->forward(x));
  if (q_norm_) {
    query = q_norm_->forward(query);
    key = k_norm_->forward(key);
  }
  query = apply_rotary(query, rotary);
  key = apply_rotary(key, rotary);
  const at::Tensor mixed = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask,
                                  /*scale=*/{}, grouped_);
  return o_proj_->forward(mixed.transpose(1, 2).reshape({batch, sequence, -1}));
}

Mlp::Mlp(int64_t hidden_size, int64_t intermediate_size, bool with_bias, at::TensorOptions options) {
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, std::make_shared<Linear>(in, out, with_bias, options));
  };
  gate_proj_ = linear("gate_proj", hidden_size, intermediate_size);
  up_proj_ = linear("up_proj", hidden_size, intermediate_size);
  down_proj_ = linear("down_proj", intermediate_size, hidden_size);
}

at::Tensor Mlp::body(const at::Tensor& x) const {
  const at::Tensor gate = gate_proj_->forward(x), up = up_proj_->forward(x);
  if (down_proj_->is_plain()) return swiglu_linear(gate, up, down_proj_->weight);
  return down_proj_->forward(swiglu(gate, up));
}

}  // namespace neap::models
