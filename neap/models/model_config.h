// torch-free
// What makes one decoder of the Llama family (Llama 2/3, SmolLM2, Mistral, Qwen 2/3) or of the DeepSeek-V3 family
// different from another, read from and written to a Hugging Face config.json.
//
// A DeepSeek-V3 is a model whose attention is latent and whose later layers have experts in place of the mlp; the rest
// it shares with the Llama family.
//
// Only what the models layer computes exactly is accepted: an architecture it does not know, or a field that would
// change the numbers and is not implemented, is a UserError that lists every such field at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace neap::models {

struct RopeScaling {
  enum class Type { kDefault, kLinear, kLlama3, kYarn };
  Type type = Type::kDefault;
  double factor = 1.0;
  // kLlama3: wavelengths longer than original_max_position_embeddings / low_freq_factor are stretched by `factor`,
  // those shorter than … / high_freq_factor are kept, those between are blended.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 0;  // kLlama3 and kYarn
  // kYarn (arXiv 2309.00071): frequencies that turn more than beta_fast times within the original length are kept,
  // those that turn less than beta_slow times are stretched, those between are blended.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;  // the borders of the blend are whole dimensions
  // What cos and sin are multiplied by; empty: follows from `factor` and the mscales.
  std::optional<double> attention_factor;
  double mscale = 0.0;
  double mscale_all_dim = 0.0;  // latent attention also sharpens its softmax by it

  double table_factor() const;    // of cos and sin
  double softmax_factor() const;  // of the scores of latent attention
};

// Attention whose keys and values are computed from one small vector per token (MLA: DeepSeek-V2, arXiv 2405.04434).
// Each head of a query or key has a part without position and one that is rotated; the rotated part of the key is
// shared by all heads.
struct LatentAttentionConfig {
  std::optional<int64_t> q_lora_rank;  // empty: queries are projected in one step
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  bool rope_interleave = true;  // pairs to rotate are neighbours, not halves apart

  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

// A mixture of experts without token dropping (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
struct ExpertsConfig {
  int64_t count = 0;                 // n_routed_experts
  int64_t per_token = 0;             // num_experts_per_tok
  int64_t groups = 1;                // n_group: experts lie in so many groups of equal size …
  int64_t groups_per_token = 1;      // topk_group: … of which a token may use the best so many
  int64_t intermediate_size = 0;     // moe_intermediate_size, of one expert
  int64_t shared = 1;                // n_shared_experts: every token passes them; one mlp of so many times the size
  int64_t first_layer = 0;           // first_k_dense_replace: the layers before have an mlp
  bool norm_topk_prob = true;        // the weights of a token's experts sum up to 1 …
  double routed_scaling_factor = 1;  // … times this
};

struct ModelConfig {
  std::string model_type = "llama";  // llama, mistral, qwen2, qwen3 or deepseek_v3: as transformers names it
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;  // latent attention: as many as attention heads
  int64_t head_dim = 0;             // latent attention: what is rotated, qk_rope_head_dim
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  double initializer_range = 0.02;
  bool qkv_bias = false;     // latent attention: of its two down-projections
  bool output_bias = false;  // of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm over each head of q and k, before the rotation
  bool tie_word_embeddings = false;
  // Attention sees only so many positions back. Not implemented; harmless for sequences that are not longer, so it is
  // checked when a sequence arrives.
  std::optional<int64_t> sliding_window;
  std::optional<int64_t> bos_token_id;
  std::optional<int64_t> eos_token_id;

  std::optional<LatentAttentionConfig> latent_attention;  // empty: grouped-query attention
  std::optional<ExpertsConfig> experts;                   // empty: every layer has an mlp
  // Layers behind the last one that predict further tokens (num_nextn_predict_layers; mtp_layer.h), and whether a model
  // has them. Without them what a directory holds of them is left there, with a warning, and config.json says 0.
  int64_t mtp_layers = 0;
  bool with_mtp = false;

  // `source` names the text in messages: the path of the file, say.
  static ModelConfig from_json(std::string_view text, std::string_view source = "config.json");
  static ModelConfig from_file(const std::filesystem::path& config_json);

  // As transformers reads it (4.x and 5.x); `dtype` is a torch name, "float32" or "bfloat16".
  std::string to_json(std::string_view dtype = "float32") const;

  // Throws a UserError that lists every impossible value. from_json() has called it; for configurations made by hand.
  void validate(std::string_view source = "ModelConfig") const;

  std::string architecture() const;  // "LlamaForCausalLM"
  int64_t built_mtp_layers() const { return with_mtp ? mtp_layers : 0; }
  bool has_experts(int64_t layer) const { return experts && layer >= experts->first_layer; }
};

}  // namespace neap::models
