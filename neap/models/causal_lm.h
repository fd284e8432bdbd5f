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
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "neap/models/chunked_cross_entropy.h"
#include "neap/models/decoder_layer.h"
#include "neap/models/layers.h"
#include "neap/models/model_config.h"
#include "neap/models/mtp_layer.h"

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
  // One for each of `tasks`, in one run of the unit.
  struct Task {
    at::Tensor hidden, labels;
    LossOptions options;
  };
  std::vector<at::Tensor> losses(const std::vector<Task>& tasks);
};

// Children "0", "1", …: the decoder's layers, then those that predict further tokens, as files count them.
class LayerList : public torch::nn::Module {
 public:
  LayerList(const ModelConfig& config, at::TensorOptions options);
  const std::vector<std::shared_ptr<DecoderLayer>>& layers() const { return layers_; }
  const std::vector<std::shared_ptr<MtpLayer>>& mtp_layers() const { return mtp_layers_; }

 private:
  std::vector<std::shared_ptr<DecoderLayer>> layers_;
  std::vector<std::shared_ptr<MtpLayer>> mtp_layers_;
};

// The decoder without its head; named "model" in a CausalLM.
class Decoder : public torch::nn::Module {
 public:
  Decoder(const ModelConfig& config, at::TensorOptions options);

  struct Output {
    at::Tensor hidden;     // [batch, sequence, hidden], normalised
    at::Tensor embedding;  // the embedding weight, for a tied head (see tied_embedding()); else undefined
    std::vector<at::Tensor> further = {};  // of forward_further(): as `hidden`, of each depth
  };
  Output forward(const at::Tensor& ids);
  // Also runs the layers that predict further tokens. `tokens` [batch, sequence + their number]: each row goes on.
  Output forward_further(const at::Tensor& tokens);

  void separate_documents(int64_t end_token) { end_token_ = end_token; }

  const std::vector<std::shared_ptr<DecoderLayer>>& layers() const { return layers_->layers(); }
  const std::vector<std::shared_ptr<MtpLayer>>& mtp_layers() const { return layers_->mtp_layers(); }

  std::shared_ptr<Embedding> embed_tokens;

 private:
  at::Tensor frequencies_on(c10::Device device);
  // What all layers of one forward share.
  struct Shared {
    RotaryTables rotary;
    at::Tensor mask;  // undefined unless documents are separate
  };
  Output embed(const at::Tensor& ids);
  Shared shared_of(const at::Tensor& ids, const at::Tensor& hidden);
  at::Tensor decoded(at::Tensor hidden, const Shared& shared);

  ModelConfig config_;
  std::optional<int64_t> end_token_;
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

  struct Losses {
    at::Tensor loss;  // as loss() has it
    // Of the layers that predict further tokens, the mean over them, without z_loss. Depth k predicts labels[b, s + k]
    // at s; a token counts where it and all labels before it, from labels[b, s] on, do, so the last k of a row do not.
    // Each depth's sum is divided as that of `loss` is, by the number of labels that are not ignored.
    at::Tensor further;
  };
  // REQUIRES: config.built_mtp_layers() > 0.
  Losses losses(const at::Tensor& ids, const at::Tensor& labels, const LossOptions& options = {});

  // From here on each row's documents, which end with `end_token`, do not see each other, and the positions of each
  // begin at 0. Labels that lead from one to the next are the caller's to ignore. A forward makes one mask for all
  // layers, [batch, 1, sequence, sequence] in the dtype of the hidden states; attention then costs what it does over
  // whole rows.
  void separate_documents(int64_t end_token) { model_->separate_documents(end_token); }

  // Normal with config.initializer_range, norms 1, biases 0. Drawn on the CPU in float32: the same on every device.
  void init_weights(uint64_t seed);
  // What init_weights() writes, one parameter after the other: float32, on the CPU, dropped when `visit` returns. For
  // models whose parameters have no memory (the meta device), or only pieces of it (neap/shard).
  void draw_weights(uint64_t seed,
                    c10::function_ref<void(const std::string& name, const at::Tensor& value)> visit) const;
  // Gives the buffers memory on `device`, all zero: for a model of the meta device whose parameters get theirs later.
  void place_buffers(c10::Device device);

  const ModelConfig& config() const { return config_; }
  // Of the decoder's layers that have experts, in order; `further`: and of those that predict further tokens.
  std::vector<MixtureOfExperts*> expert_layers(bool further = false) const;
  const std::vector<std::shared_ptr<MtpLayer>>& mtp_layers() const { return model_->mtp_layers(); }

 private:
  void check_ids(const at::Tensor& ids) const;
  void check_labels(const at::Tensor& ids, const at::Tensor& labels) const;
  ModelConfig config_;
  std::shared_ptr<Decoder> model_;
  std::shared_ptr<Head> lm_head_;  // null if tied
};

// A randomly initialised model. `options` give dtype and device.
std::shared_ptr<CausalLM> make_model(const ModelConfig& config, at::TensorOptions options = {}, uint64_t seed = 0);

}  // namespace neap::models
