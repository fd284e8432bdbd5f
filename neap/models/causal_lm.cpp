#include "neap/models/causal_lm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <string>

#include "neap/base/error.h"
#include "neap/models/mixture_of_experts.h"
#include "neap/models/rotary.h"

namespace neap::models {

Embedding::Embedding(int64_t vocabulary, int64_t size, at::TensorOptions options)
    : weight(register_parameter("weight", at::empty({vocabulary, size}, options))) {}

LayerList::LayerList(const ModelConfig& config, at::TensorOptions options) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers_.push_back(register_module(std::to_string(i), std::make_shared<DecoderLayer>(config, i, options)));
  }
}

Decoder::Decoder(const ModelConfig& config, at::TensorOptions options)
    : embed_tokens(
          register_module("embed_tokens", std::make_shared<Embedding>(config.vocab_size, config.hidden_size, options))),
      config_(config),
      frequencies_(rotary_frequencies(config)),
      layers_(register_module("layers", std::make_shared<LayerList>(config, options))),
      norm_(register_module("norm", std::make_shared<RmsNorm>(config.hidden_size, config.rms_norm_eps, options))) {}

at::Tensor Decoder::frequencies_on(c10::Device device) {
  // Moved on the first forward on a device and kept there: later forwards copy nothing.
  if (frequencies_.device() != device) frequencies_ = frequencies_.to(device);
  return frequencies_;
}

Decoder::Output Decoder::forward(const at::Tensor& ids) {
  Output out;
  if (config_.tie_word_embeddings) {
    std::tie(out.hidden, out.embedding) = tied_embedding(embed_tokens->weight, ids);
  } else {
    out.hidden = at::embedding(embed_tokens->weight, ids);
  }
  const RotaryTables rotary = rotary_tables(frequencies_on(out.hidden.device()), ids.size(1), out.hidden.scalar_type(),
                                            config_.rope_scaling.table_factor());
  for (const auto& layer : layers_->layers()) out.hidden = layer->forward(out.hidden, rotary);
  out.hidden = norm_->forward(out.hidden);
  return out;
}

CausalLM::CausalLM(ModelConfig config, at::TensorOptions options) : config_(std::move(config)) {
  config_.validate();
  model_ = register_module("model", std::make_shared<Decoder>(config_, options));
  if (config_.tie_word_embeddings) return;
  lm_head_ = register_module(
      "lm_head", std::make_shared<Linear>(config_.hidden_size, config_.vocab_size, /*with_bias=*/false, options));
}

void CausalLM::check_ids(const at::Tensor& ids) const {
  NEAP_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong,
             "[models] expected token ids [batch, sequence] of int64; found ", ids.scalar_type(), " ", ids.sizes());
  NEAP_CHECK(!config_.sliding_window || ids.size(1) <= *config_.sliding_window,
             "[models] sequences longer than the sliding window are not supported: the window is ",
             config_.sliding_window.value_or(0), " tokens; found ", ids.size(1), "; use shorter sequences");
}

std::pair<at::Tensor, at::Tensor> CausalLM::hidden_and_head(const at::Tensor& ids) {
  check_ids(ids);
  Decoder::Output out = model_->forward(ids);
  return {std::move(out.hidden), lm_head_ ? lm_head_->weight : std::move(out.embedding)};
}

at::Tensor CausalLM::hidden(const at::Tensor& ids) { return hidden_and_head(ids).first; }

at::Tensor CausalLM::logits(const at::Tensor& ids) {
  const auto [hidden, head] = hidden_and_head(ids);
  return at::linear(hidden, head);
}

at::Tensor CausalLM::loss(const at::Tensor& ids, const at::Tensor& labels, const LossOptions& options) {
  NEAP_CHECK(labels.sizes() == ids.sizes(), "[models] expected one label per token: ", ids.sizes(), "; found ",
             labels.sizes());
  const auto [hidden, head] = hidden_and_head(ids);
  return chunked_cross_entropy(hidden.view({-1, hidden.size(-1)}), head, labels.reshape({-1}), options);
}

void CausalLM::draw_weights(uint64_t seed,
                            c10::function_ref<void(const std::string& name, const at::Tensor& value)> visit) const {
  const at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& item : named_parameters()) {
    const at::Tensor value = at::empty(item.value().sizes(), at::kFloat);
    if (value.dim() == 1) {
      value.fill_(item.key().ends_with(".bias") ? 0.0 : 1.0);
    } else {
      value.normal_(0.0, config_.initializer_range, generator);
    }
    visit(item.key(), value);
  }
}

void CausalLM::init_weights(uint64_t seed) {
  const at::NoGradGuard no_grad;
  auto parameters = named_parameters();
  draw_weights(seed, [&](const std::string& name, const at::Tensor& value) { parameters[name].copy_(value); });
}

void CausalLM::place_buffers(c10::Device device) {
  for (MixtureOfExperts* layer : expert_layers()) layer->router().place_buffers(device);
}

std::vector<MixtureOfExperts*> CausalLM::expert_layers() const {
  std::vector<MixtureOfExperts*> found;
  for (const auto& layer : model_->layers()) {
    if (layer->experts() != nullptr) found.push_back(layer->experts());
  }
  return found;
}

std::shared_ptr<CausalLM> make_model(const ModelConfig& config, at::TensorOptions options, uint64_t seed) {
  auto model = std::make_shared<CausalLM>(config, options);
  model->init_weights(seed);
  return model;
}

}  // namespace neap::models
