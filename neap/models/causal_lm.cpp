#include "neap/models/causal_lm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <string>
#include <tuple>

#include "neap/autograd/backward_reads.h"
#include "neap/base/error.h"
#include "neap/models/mixture_of_experts.h"
#include "neap/models/rotary.h"

namespace neap::models {
namespace {

std::shared_ptr<Embedding> make_embedding(const ModelConfig& config, at::TensorOptions options) {
  if (config.tie_word_embeddings) return std::make_shared<Embedding>(config.vocab_size, config.hidden_size, options);
  return std::make_shared<EmbeddingUnit>(config.vocab_size, config.hidden_size, options);
}

at::Tensor head_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                     const LossOptions& options) {
  return chunked_cross_entropy(hidden.view({-1, hidden.size(-1)}), weight, labels.reshape({-1}), options);
}

}  // namespace

Embedding::Embedding(int64_t vocabulary, int64_t size, at::TensorOptions options)
    : weight(register_parameter("weight", at::empty({vocabulary, size}, options))) {}

at::Tensor EmbeddingUnit::forward(const at::Tensor& ids) {
  return hook_point().run({ids}, [&] {
    autograd::backward_reads_no_parameters(hook_point());
    return at::embedding(weight, ids);
  });
}

Head::Head(int64_t hidden_size, int64_t vocabulary, at::TensorOptions options)
    : Linear(hidden_size, vocabulary, /*with_bias=*/false, options) {}

at::Tensor Head::logits(const at::Tensor& hidden) { return hook_point().run(*this, {hidden}, &Head::forward); }

at::Tensor Head::loss(const at::Tensor& hidden, const at::Tensor& labels, const LossOptions& options) {
  return hook_point().run({hidden}, [&] {
    autograd::backward_reads_no_parameters(hook_point());
    return head_loss(hidden, weight, labels, options);
  });
}

LayerList::LayerList(const ModelConfig& config, at::TensorOptions options) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers_.push_back(register_module(std::to_string(i), std::make_shared<DecoderLayer>(config, i, options)));
  }
}

Decoder::Decoder(const ModelConfig& config, at::TensorOptions options)
    : embed_tokens(register_module("embed_tokens", make_embedding(config, options))),
      config_(config),
      frequencies_(rotary_frequencies(config)),
      layers_(register_module("layers", std::make_shared<LayerList>(config, options))),
      norm_(register_module("norm", std::make_shared<RmsNorm>(config.hidden_size, config.rms_norm_eps, options))) {}

at::Tensor Decoder::frequencies_on(c10::Device device) {
  // Moved on the first forward on a device and kept there: later forwards copy nothing.
  if (frequencies_.device() != device) frequencies_ = frequencies_.to(device);
  return frequencies_;
}

Decoder::Output Decoder::embed(const at::Tensor& ids) {
  if (auto* unit = dynamic_cast<EmbeddingUnit*>(embed_tokens.get())) return {unit->forward(ids), {}};
  Output out;
  std::tie(out.hidden, out.embedding) = tied_embedding(embed_tokens->weight, ids);
  return out;
}

Decoder::Output Decoder::forward(const at::Tensor& ids) {
  Output out = embed(ids);
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
  lm_head_ = register_module("lm_head", std::make_shared<Head>(config_.hidden_size, config_.vocab_size, options));
}

void CausalLM::check_ids(const at::Tensor& ids) const {
  NEAP_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong,
             "[models] expected token ids [batch, sequence] of int64; found ", ids.scalar_type(), " ", ids.sizes());
  NEAP_CHECK(!config_.sliding_window || ids.size(1) <= *config_.sliding_window,
             "[models] sequences longer than the sliding window are not supported: the window is ",
             config_.sliding_window.value_or(0), " tokens; found ", ids.size(1), "; use shorter sequences");
}

at::Tensor CausalLM::hidden(const at::Tensor& ids) {
  check_ids(ids);
  return model_->forward(ids).hidden;
}

at::Tensor CausalLM::logits(const at::Tensor& ids) {
  check_ids(ids);
  const auto [hidden, embedding] = model_->forward(ids);
  return lm_head_ ? lm_head_->logits(hidden) : at::linear(hidden, embedding);
}

at::Tensor CausalLM::loss(const at::Tensor& ids, const at::Tensor& labels, const LossOptions& options) {
  NEAP_CHECK(labels.sizes() == ids.sizes(), "[models] expected one label per token: ", ids.sizes(), "; found ",
             labels.sizes());
  check_ids(ids);
  const auto [hidden, embedding] = model_->forward(ids);
  return lm_head_ ? lm_head_->loss(hidden, labels, options) : head_loss(hidden, embedding, labels, options);
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
