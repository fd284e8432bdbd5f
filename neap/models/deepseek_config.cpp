// torch-free
#include <algorithm>

#include "neap/base/error.h"
#include "neap/models/internal/config_parts.h"

namespace neap::models::internal {
namespace {

using neap::internal::concat;

LatentAttentionConfig read_attention(JsonReader& reader) {
  LatentAttentionConfig latent;
  // Null is a choice, so a missing key must not be taken for one.
  if (!reader.present("q_lora_rank")) reader.fault("q_lora_rank", "is missing (null: queries are projected at once)");
  reader.read("q_lora_rank", latent.q_lora_rank);
  reader.require("kv_lora_rank", latent.kv_lora_rank);
  reader.require("qk_nope_head_dim", latent.qk_nope_head_dim);
  reader.require("qk_rope_head_dim", latent.qk_rope_head_dim);
  reader.require("v_head_dim", latent.v_head_dim);
  reader.read("rope_interleave", latent.rope_interleave);
  return latent;
}

// Where a key is missing, transformers' DeepseekV3Config has the values of the published model.
ExpertsConfig read_experts(JsonReader& reader) {
  ExpertsConfig experts;
  reader.require("n_routed_experts", experts.count);
  reader.require("moe_intermediate_size", experts.intermediate_size);
  experts.per_token = reader.get<int64_t>("num_experts_per_tok", 8);
  experts.groups = reader.get<int64_t>("n_group", 8);
  experts.groups_per_token = reader.get<int64_t>("topk_group", 4);
  experts.shared = reader.get<int64_t>("n_shared_experts", 1);
  experts.first_layer = reader.get<int64_t>("first_k_dense_replace", 3);
  experts.norm_topk_prob = reader.get("norm_topk_prob", true);
  experts.routed_scaling_factor = reader.get("routed_scaling_factor", 2.5);
  // Of the configuration that was published with the weights; transformers knows only this kind of routing.
  reader.expect<int64_t>("moe_layer_freq", 1);
  reader.expect<std::string>("scoring_func", "sigmoid");
  reader.expect<std::string>("topk_method", "noaux_tc");
  return experts;
}

}  // namespace

void read_deepseek(JsonReader& reader, ModelConfig& config) {
  config.latent_attention = read_attention(reader);
  config.experts = read_experts(reader);
  config.head_dim = config.latent_attention->qk_rope_head_dim;
  config.qkv_bias = config.output_bias = reader.get("attention_bias", false);
  for (const char* key : {"num_mtp_layers", "num_nextn_predict_layers"}) reader.read(key, config.mtp_layers);
}

void check_deepseek(const ModelConfig& config, const Expect& expect) {
  if (config.latent_attention) {
    const LatentAttentionConfig& latent = *config.latent_attention;
    check_sizes({{"q_lora_rank", latent.q_lora_rank.value_or(1), kWidest},
                 {"kv_lora_rank", latent.kv_lora_rank, kWidest},
                 {"qk_nope_head_dim", latent.qk_nope_head_dim, kMostParts},
                 {"qk_rope_head_dim", latent.qk_rope_head_dim, kMostParts},
                 {"v_head_dim", latent.v_head_dim, kMostParts}},
                expect);
    expect(config.head_dim == latent.qk_rope_head_dim,
           concat("head_dim must be qk_rope_head_dim (", latent.qk_rope_head_dim, "); found ", config.head_dim));
    expect(config.num_key_value_heads == config.num_attention_heads,
           concat("num_key_value_heads must be num_attention_heads (", config.num_attention_heads,
                  ") with latent attention; found ", config.num_key_value_heads));
  }
  expect(config.mtp_layers >= 0 && config.mtp_layers <= kMostLayers,
         concat("num_nextn_predict_layers must be from 0 to ", kMostLayers, "; found ", config.mtp_layers));
  expect(!config.with_mtp || (config.mtp_layers > 0 && config.experts),
         "layers that predict further tokens were asked for; num_nextn_predict_layers names none");
  if (!config.experts) return;
  const ExpertsConfig& experts = *config.experts;
  check_sizes({{"n_routed_experts", experts.count, kMostParts},
               {"num_experts_per_tok", experts.per_token, kMostParts},
               {"n_group", experts.groups, kMostParts},
               {"topk_group", experts.groups_per_token, kMostParts},
               {"moe_intermediate_size", experts.intermediate_size, kWidest},
               {"n_shared_experts", experts.shared, kMostParts}},
              expect);
  expect(experts.first_layer >= 0, concat("first_k_dense_replace must be at least 0; found ", experts.first_layer));
  expect(experts.routed_scaling_factor > 0,
         concat("routed_scaling_factor must be positive; found ", experts.routed_scaling_factor));
  if (experts.groups <= 0) return;
  // A group is judged by its two best experts.
  const int64_t in_group = experts.count / experts.groups;
  expect(experts.count % experts.groups == 0 && in_group >= 2,
         concat("n_routed_experts (", experts.count, ") must be n_group (", experts.groups, ") times 2 or more"));
  expect(experts.groups_per_token <= experts.groups,
         concat("topk_group must be at most n_group (", experts.groups, "); found ", experts.groups_per_token));
  const int64_t open = std::min(experts.groups_per_token, experts.groups) * in_group;
  expect(experts.per_token <= open, concat("num_experts_per_tok must be at most ", open,
                                           ", the experts of topk_group groups; found ", experts.per_token));
}

void write_deepseek(const ModelConfig& config, nlohmann::ordered_json& json) {
  if (config.latent_attention) {
    const LatentAttentionConfig& latent = *config.latent_attention;
    json["q_lora_rank"] = latent.q_lora_rank ? nlohmann::ordered_json(*latent.q_lora_rank) : nullptr;
    json["kv_lora_rank"] = latent.kv_lora_rank;
    json["qk_nope_head_dim"] = latent.qk_nope_head_dim;
    json["qk_rope_head_dim"] = latent.qk_rope_head_dim;
    json["v_head_dim"] = latent.v_head_dim;
    json["rope_interleave"] = latent.rope_interleave;
  }
  if (!config.experts) return;
  const ExpertsConfig& experts = *config.experts;
  json["n_routed_experts"] = experts.count;
  json["num_experts_per_tok"] = experts.per_token;
  json["n_group"] = experts.groups;
  json["topk_group"] = experts.groups_per_token;
  json["moe_intermediate_size"] = experts.intermediate_size;
  json["n_shared_experts"] = experts.shared;
  json["first_k_dense_replace"] = experts.first_layer;
  json["norm_topk_prob"] = experts.norm_topk_prob;
  json["routed_scaling_factor"] = experts.routed_scaling_factor;
  json["num_nextn_predict_layers"] = config.built_mtp_layers();
}

}  // namespace neap::models::internal
