// torch-free
// The configuration of the DeepSeek-V3 that tests of whole models build: one dense layer and two with eight experts in
// four groups, and small enough for a step of a few milliseconds. Tests change the fields that they are about.
#pragma once

#include <cstdint>

#include "neap/models/model_config.h"
#include "testing/llama_config.h"

namespace neap::testing {

inline models::ModelConfig small_deepseek(int64_t vocabulary) {
  models::ModelConfig config = small_llama(vocabulary);
  config.model_type = "deepseek_v3";
  config.num_key_value_heads = config.num_attention_heads;
  config.latent_attention = models::LatentAttentionConfig{
      .q_lora_rank = 24, .kv_lora_rank = 16, .qk_nope_head_dim = 12, .qk_rope_head_dim = 8, .v_head_dim = 10};
  config.experts = models::ExpertsConfig{.count = 8,
                                         .per_token = 3,
                                         .groups = 4,
                                         .groups_per_token = 2,
                                         .intermediate_size = 20,
                                         .shared = 1,
                                         .first_layer = 1,
                                         .routed_scaling_factor = 2.5};
  return config;
}

}  // namespace neap::testing
