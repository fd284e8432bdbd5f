#include "neap/models/decoder_layer.h"

#include <ATen/TensorOperators.h>

#include "neap/models/latent_attention.h"
#include "neap/models/mixture_of_experts.h"

namespace neap::models {

DecoderLayer::DecoderLayer(const ModelConfig& config, int64_t index, at::TensorOptions options) {
  const auto norm = [&](const char* name) {
    return register_module(name, std::make_shared<RmsNorm>(config.hidden_size, config.rms_norm_eps, options));
  };
  input_layernorm_ = norm("input_layernorm");
  if (config.latent_attention) {
    self_attn_ = std::make_shared<LatentAttention>(config, options);
  } else {
    self_attn_ = std::make_shared<Attention>(config, options);
  }
  register_module("self_attn", self_attn_);
  post_attention_layernorm_ = norm("post_attention_layernorm");
  if (config.has_experts(index)) {
    const auto experts = std::make_shared<MixtureOfExperts>(config, options);
    experts_ = experts.get();
    mlp_ = experts;
  } else {
    mlp_ = std::make_shared<Mlp>(config.hidden_size, config.intermediate_size, config.mlp_bias, options);
  }
  register_module("mlp", mlp_);
}

at::Tensor DecoderLayer::forward(const at::Tensor& hidden, const RotaryTables& rotary, const at::Tensor& mask) {
  return hook_point().run(*this, {hidden, rotary.cos, rotary.sin, mask}, &DecoderLayer::body);
}

at::Tensor DecoderLayer::body(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                              const at::Tensor& mask) const {
  const at::Tensor attended = hidden + self_attn_->forward(input_layernorm_->forward(hidden), {cos, sin}, mask);
  return attended + mlp_->forward(post_attention_layernorm_->forward(attended));
}

}  // namespace neap::models
