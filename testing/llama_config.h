// torch-free
// The configuration of the Llama that tests of whole models build: grouped heads, a gated mlp, three layers, and small
// enough for a step of a millisecond. Tests change the fields that they are about.
#pragma once

#include <cstdint>

#include "neap/models/model_config.h"

namespace neap::testing {

inline models::ModelConfig small_llama(int64_t vocabulary) {
  models::ModelConfig config;
  config.vocab_size = vocabulary;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = 3;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  return config;
}

}  // namespace neap::testing
