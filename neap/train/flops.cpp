// torch-free
#include "neap/train/flops.h"

namespace neap::train {
namespace {

// Weights that multiply a token, and multiplications of a token with each position it attends to.
struct Attention {
  double weights = 0;
  double per_position = 0;
};

Attention attention_of(const models::ModelConfig& config) {
  const auto hidden = static_cast<double>(config.hidden_size);
  const auto heads = static_cast<double>(config.num_attention_heads);
  if (!config.latent_attention) {
    const double queries = heads * static_cast<double>(config.head_dim);
    const auto keys = static_cast<double>(config.num_key_value_heads * config.head_dim);
    return {2 * hidden * queries + 2 * hidden * keys, 2 * queries};
  }
  const models::LatentAttentionConfig& latent = *config.latent_attention;
  const auto nope = static_cast<double>(latent.qk_nope_head_dim), rope = static_cast<double>(latent.qk_rope_head_dim);
  const auto value = static_cast<double>(latent.v_head_dim), rank = static_cast<double>(latent.kv_lora_rank);
  const double queries = heads * (nope + rope);
  const auto query_rank = static_cast<double>(latent.q_lora_rank.value_or(0));
  const double query = latent.q_lora_rank ? query_rank * (hidden + queries) : hidden * queries;
  const double key_value = hidden * (rank + rope) + rank * heads * (nope + value);
  return {query + key_value + heads * value * hidden, queries + heads * value};
}

// Of a layer's mlp or of the experts that a token passes.
double feed_forward_weights(const models::ModelConfig& config, int64_t layer) {
  const auto hidden = static_cast<double>(config.hidden_size);
  if (!config.has_experts(layer)) return 3 * hidden * static_cast<double>(config.intermediate_size);
  const models::ExpertsConfig& experts = *config.experts;
  const int64_t passed = experts.per_token + experts.shared;
  return hidden * static_cast<double>(experts.count + 3 * passed * experts.intermediate_size);
}

}  // namespace

double flops_per_token(const models::ModelConfig& config, int64_t sequence, bool frozen, int64_t further) {
  const Attention attention = attention_of(config);
  const auto hidden = static_cast<double>(config.hidden_size);
  const int64_t layers = config.num_hidden_layers + further;
  double weights = hidden * static_cast<double>(config.vocab_size) * static_cast<double>(1 + further) +
                   2 * hidden * hidden * static_cast<double>(further);
  for (int64_t layer = 0; layer < layers; ++layer) {
    weights += attention.weights + feed_forward_weights(config, layer);
  }
  return (frozen ? 4 : 6) * weights +
         6 * static_cast<double>(layers) * attention.per_position * static_cast<double>(sequence);
}

}  // namespace neap::train
