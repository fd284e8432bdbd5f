// A decoder of the Llama or DeepSeek-V3 family with its output head: the model `neap train` trains.
//
// Start here: `auto model = make_model(config);  model->loss(ids, labels).backward();`, or model_from_hf(dir) of
// hugging_face.h. Every decoder layer and its attention and mlp are hook points, found by their names:
// model.layers.3, model.layers.3.self_attn, model.layers.3.mlp (experts or not). So are model.embed_tokens and lm_head,
// unless they are tied. Rotary tables are made once a forward and handed to every layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "neap/models/chunked_cross_entropy.h"
#include "neap/models/decoder_layer.h"
#include "neap/models/layers.h"
#include "neap/models/model_config.h"

namespace neap::models {

class Embedding : public torch::nn::Module {
 public:
  Embedding(int64_t vocabulary, int64_t size, at::TensorOptions options);
  at::Tensor weight;
};

// An embedding whose weight nobody else uses: a hook point. It keeps nothing but the ids for backward, so recomputing
// it would gain nothing, and is refused.
class EmbeddingUnit final : public Embedding, public autograd::Hookable {
 public:
  using Embedding::Embedding;
  at::Tensor forward(const at::Tensor& ids);
};

// An output head with a weight of its own: a hook point. Of the loss it keeps nothing but the gradients made in
// forward, which a second run would make at twice the price: recomputing the loss is refused.
class Head final : public Linear, public autograd::Hookable {
 public:
  Head(int64_t hidden_size, int64_t vocabulary, at::TensorOptions options);
  at::Tensor logits(const at::Tensor& hidden);
  // As chunked_cross_entropy(), of hidden [batch, sequence, hidden] and labels [batch, sequence].
  at::Tensor loss(const at::Tensor& hidden, const at::Tensor& labels, const LossOptions& options);
};

// Children "0", "1", …
class LayerList : public torch::nn::Module {
 public:
  LayerList(const ModelConfig& config, at::TensorOptions options);
  const std::vector<std::shared_ptr<DecoderLayer>>& layers() const { return layers_; }

 private:
  std::vector<std::shared_ptr<DecoderLayer>> layers_;
};

// The decoder without its head; named "model" in a CausalLM.
class Decoder : public torch::nn::Module {
 public:
  Decoder(const ModelConfig& config, at::TensorOptions options);

  struct Output {
    at::Tensor hidden;     // [batch, sequence, hidden], normalised
    at::Tensor embedding;  // the embedding weight, for a tied head (see tied_embedding()); else undefined
  };
  Output forward(const at::Tensor& ids);

  const std::vector<std::shared_ptr<DecoderLayer>>& layers() const { return layers_->layers(); }

  std::shared_ptr<Embedding> embed_tokens;

 private:
  at::Tensor frequencies_on(c10::Device device);
  Output embed(const at::Tensor& ids);

  ModelConfig config_;
  at::Tensor frequencies_;  // not a buffer: stays float32 whatever to() is asked for
  std::shared_ptr<LayerList> layers_;
  std::shared_ptr<RmsNorm> norm_;
};

class CausalLM : public torch::nn::Module {
 public:
  // Parameters are uninitialised and require gradients.
  explicit CausalLM(ModelConfig config, at::TensorOptions options = {});

  // ids [batch, sequence] of int64 on the model's device, positions from 0.
  at::Tensor hidden(const at::Tensor& ids);  // last hidden states, normalised: [batch, sequence, hidden]
  at::Tensor logits(const at::Tensor& ids);  // [batch, sequence, vocabulary], whole in memory
  // labels [batch, sequence]: labels[b, s] is the token that shall follow ids[b, s]. Nothing is shifted here.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& labels, const LossOptions& options = {});

  // Normal with config.initializer_range, norms 1, biases 0. Drawn on the CPU in float32: the same on every device.
  void init_weights(uint64_t seed);
  // What init_weights() writes, one parameter after the other: float32, on the CPU, dropped when `visit` returns. For
  // models whose parameters have no memory (the meta device), or only pieces of it (neap/shard).
  void draw_weights(uint64_t seed,
                    c10::function_ref<void(const std::string& name, const at::Tensor& value)> visit) const;
  // Gives the buffers memory on `device`, all zero: for a model of the meta device whose parameters get theirs later.
  void place_buffers(c10::Device device);

  const ModelConfig& config() const { return config_; }
  // Of the layers that have experts, in order.
  std::vector<MixtureOfExperts*> expert_layers() const;

 private:
  void check_ids(const at::Tensor& ids) const;
  ModelConfig config_;
  std::shared_ptr<Decoder> model_;
  std::shared_ptr<Head> lm_head_;  // null if tied
};

// A randomly initialised model. `options` give dtype and device.
std::shared_ptr<CausalLM> make_model(const ModelConfig& config, at::TensorOptions options = {}, uint64_t seed = 0);

}  // namespace neap::models
