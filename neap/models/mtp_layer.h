// A layer behind the decoder that predicts one token further (multi-token prediction: DeepSeek-V3, arXiv 2412.19437,
// section 2.2).
//
// Depth k = 1, 2, … takes what the depth before made of token i (depth 0: the decoder, normalised for the head) and the
// embedding of token i + k, which training knows, and makes of the two what the model's own head predicts token
// i + k + 1 from. Everything stays causal: positions are those of i.
//
// Files have depth k as layer num_hidden_layers + k - 1 of the model. The projection takes the embedding first, then
// the hidden state, as the published weights do; the report writes them the other way round.
#pragma once

#include "neap/models/decoder_layer.h"

namespace neap::models {

// The head itself is the model's; what lies before it is the layer's own.
class SharedHead : public torch::nn::Module {
 public:
  SharedHead(const ModelConfig& config, at::TensorOptions options);
  at::Tensor normalised(const at::Tensor& hidden) const { return norm_->forward(hidden); }

 private:
  std::shared_ptr<RmsNorm> norm_;
};

class MtpLayer final : public DecoderLayer {
 public:
  // `depth` from 1.
  MtpLayer(const ModelConfig& config, int64_t depth, at::TensorOptions options);
  // hidden and next [batch, sequence, hidden] → the same, normalised for the head.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& next, const RotaryTables& rotary,
                     const at::Tensor& mask = {});

 private:
  at::Tensor further(const at::Tensor& hidden, const at::Tensor& next, const at::Tensor& cos, const at::Tensor& sin,
                     const at::Tensor& mask) const;

  std::shared_ptr<RmsNorm> enorm_, hnorm_;
  std::shared_ptr<Linear> eh_proj_;
  std::shared_ptr<SharedHead> shared_head_;
};

}  // namespace neap::models
