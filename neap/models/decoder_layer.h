// One layer of a decoder: norm and attention, norm and mlp or experts, each added to what came in. Which kinds of them
// follows from the configuration; the layer, its attention and its mlp are hook points of any kind.
#pragma once

#include "neap/models/layers.h"

namespace neap::models {

class MixtureOfExperts;

class DecoderLayer : public torch::nn::Module, public autograd::Hookable {
 public:
  DecoderLayer(const ModelConfig& config, int64_t index, at::TensorOptions options);
  // `mask` as in AttentionUnit.
  at::Tensor forward(const at::Tensor& hidden, const RotaryTables& rotary, const at::Tensor& mask = {});

  MixtureOfExperts* experts() const { return experts_; }  // null if it has an mlp

 protected:
  at::Tensor body(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& mask) const;

 private:
  std::shared_ptr<RmsNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<AttentionUnit> self_attn_;
  std::shared_ptr<FeedForwardUnit> mlp_;
  MixtureOfExperts* experts_ = nullptr;  // mlp_, if it is one
};

}  // namespace neap::models
