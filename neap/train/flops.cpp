// torch-free
#include "neap/train/flops.h"

namespace neap::train {

double flops_per_token(const models::LlamaConfig& config, int64_t sequence) {
  const auto hidden = static_cast<double>(config.hidden_size);
  const auto queries = static_cast<double>(config.num_attention_heads * config.head_dim);
  const auto keys = static_cast<double>(config.num_key_value_heads * config.head_dim);
  const double attention = 2 * hidden * queries + 2 * hidden * keys;
  const double mlp = 3 * hidden * static_cast<double>(config.intermediate_size);
  const auto layers = static_cast<double>(config.num_hidden_layers);
  const double weights = layers * (attention + mlp) + hidden * static_cast<double>(config.vocab_size);
  return 6 * weights + 12 * layers * queries * static_cast<double>(sequence);
}

}  // namespace neap::train
