#include "neap/models/causal_lm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "neap/autograd/backward_reads.h"
#include "neap/base/error.h"
#include "neap/models/documents.h"
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

// The tokens that follow each row's, as far as they are known: its last label. Rows need `count` of them; what comes in
// place of the others reaches no token that counts.
at::Tensor continued(const at::Tensor& ids, const at::Tensor& labels, int64_t count) {
  const at::Tensor next = labels.narrow(1, labels.size(1) - 1, 1).clamp_min(0);
  return at::cat({ids, next.expand({-1, count})}, 1);
}

// What depth `depth` predicts: labels so many places later, ignored where one on the way is.
at::Tensor later_labels(const at::Tensor& labels, int64_t depth, int64_t ignore_index) {
  const int64_t sequence = labels.size(1), left = std::max<int64_t>(sequence - depth, 0);
  at::Tensor later = at::full_like(labels, ignore_index);
  if (left == 0) return later;
  at::Tensor kept = labels.narrow(1, depth, left);
  for (int64_t before = 0; before < depth; ++before) {
    kept = kept.masked_fill(labels.narrow(1, before, left).eq(ignore_index), ignore_index);
  }
  later.narrow(1, 0, left).copy_(kept);
  return later;
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

std::vector<at::Tensor> Head::losses(const std::vector<Task>& tasks) {
  std::vector<at::Tensor> inputs;
  for (const Task& task : tasks) inputs.push_back(task.hidden);
  return hook_point().run(inputs, [&] {
    autograd::backward_reads_no_parameters(hook_point());
    std::vector<at::Tensor> losses;
    for (const Task& task : tasks) losses.push_back(head_loss(task.hidden, weight, task.labels, task.options));
    return losses;
  });
}

LayerList::LayerList(const ModelConfig& config, at::TensorOptions options) {
  int64_t index = 0;
  for (; index < config.num_hidden_layers; ++index) {
    layers_.push_back(register_module(std::to_string(index), std::make_shared<DecoderLayer>(config, index, options)));
  }
  for (int64_t depth = 1; depth <= config.built_mtp_layers(); ++depth, ++index) {
    mtp_layers_.push_back(register_module(std::to_string(index), std::make_shared<MtpLayer>(config, depth, options)));
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

Decoder::Shared Decoder::shared_of(const at::Tensor& ids, const at::Tensor& hidden) {
  const at::Tensor frequencies = frequencies_on(hidden.device());
  const at::ScalarType type = hidden.scalar_type();
  const double factor = config_.rope_scaling.table_factor();
  if (!end_token_) return {rotary_tables(frequencies, ids.size(1), type, factor), {}};
  const Documents documents = find_documents(ids, *end_token_, type);
  return {rotary_tables(frequencies, documents.positions, type, factor), documents.mask};
}

at::Tensor Decoder::decoded(at::Tensor hidden, const Shared& shared) {
  for (const auto& layer : layers_->layers()) hidden = layer->forward(hidden, shared.rotary, shared.mask);
  return norm_->forward(hidden);
}

Decoder::Output Decoder::forward(const at::Tensor& ids) {
  Output out = embed(ids);
  const Shared shared = shared_of(ids, out.hidden);
  out.hidden = decoded(std::move(out.hidden), shared);
  return out;
}

Decoder::Output Decoder::forward_further(const at::Tensor& tokens) {
  // One lookup for the decoder and all depths: the table is used, and its gradient made, once.
  Output out = embed(tokens);
  const at::Tensor embedded = std::exchange(out.hidden, {});
  const int64_t sequence = tokens.size(1) - static_cast<int64_t>(mtp_layers().size());
  const auto beginning_at = [&](int64_t place) { return embedded.narrow(1, place, sequence); };
  const Shared shared = shared_of(tokens.narrow(1, 0, sequence), embedded);
  out.hidden = decoded(beginning_at(0), shared);
  at::Tensor hidden = out.hidden;
  for (const auto& layer : mtp_layers()) {
    const auto depth = static_cast<int64_t>(out.further.size()) + 1;
    hidden = layer->forward(hidden, beginning_at(depth), shared.rotary, shared.mask);
    out.further.push_back(hidden);
  }
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
  const Decoder::Output out = model_->forward(ids);
  return lm_head_ ? lm_head_->logits(out.hidden) : at::linear(out.hidden, out.embedding);
}

void CausalLM::check_labels(const at::Tensor& ids, const at::Tensor& labels) const {
  NEAP_CHECK(labels.sizes() == ids.sizes(), "[models] expected one label per token: ", ids.sizes(), "; found ",
             labels.sizes());
  check_ids(ids);
}

at::Tensor CausalLM::loss(const at::Tensor& ids, const at::Tensor& labels, const LossOptions& options) {
  check_labels(ids, labels);
  const Decoder::Output out = model_->forward(ids);
  return lm_head_ ? lm_head_->loss(out.hidden, labels, options) : head_loss(out.hidden, out.embedding, labels, options);
}

CausalLM::Losses CausalLM::losses(const at::Tensor& ids, const at::Tensor& labels, const LossOptions& options) {
  check_labels(ids, labels);
  const int64_t depths = config_.built_mtp_layers();
  NEAP_ASSERT(depths > 0, "losses of a model without layers that predict further tokens");
  const Decoder::Output out = model_->forward_further(continued(ids, labels, depths));
  LossOptions further = options;
  further.z_loss = 0;
  if (!further.divisor) further.divisor = std::max(labels.ne(options.ignore_index).sum().item<double>(), 1.0);
  std::vector<Head::Task> tasks = {{out.hidden, labels, options}};
  for (const at::Tensor& hidden : out.further) {
    tasks.push_back({hidden, later_labels(labels, static_cast<int64_t>(tasks.size()), options.ignore_index), further});
  }
  std::vector<at::Tensor> losses;
  if (lm_head_) {
    losses = lm_head_->losses(tasks);
  } else {
    for (const auto& task : tasks) losses.push_back(head_loss(task.hidden, out.embedding, task.labels, task.options));
  }
  at::Tensor sum = losses[1];
  for (std::size_t i = 2; i < losses.size(); ++i) sum = sum + losses[i];
  return {losses[0], depths == 1 ? sum : sum / static_cast<double>(depths)};
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
  for (MixtureOfExperts* layer : expert_layers(/*further=*/true)) layer->router().place_buffers(device);
}

std::vector<MixtureOfExperts*> CausalLM::expert_layers(bool further) const {
  std::vector<MixtureOfExperts*> found;
  const auto add = [&](const DecoderLayer& layer) {
    if (layer.experts() != nullptr) found.push_back(layer.experts());
  };
  for (const auto& layer : model_->layers()) add(*layer);
  if (!further) return found;
  for (const auto& layer : model_->mtp_layers()) add(*layer);
  return found;
}

std::shared_ptr<CausalLM> make_model(const ModelConfig& config, at::TensorOptions options, uint64_t seed) {
  auto model = std::make_shared<CausalLM>(config, options);
  model->init_weights(seed);
  return model;
}

}  // namespace neap::models
