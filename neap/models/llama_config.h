// torch-free
// What makes one model of the Llama family (Llama 2/3, SmolLM2, Mistral, Qwen 2/3) different from another, read from
// and written to a Hugging Face config.json.
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
  enum class Type { kDefault, kLinear, kLlama3 };
  Type type = Type::kDefault;
  double factor = 1.0;
  // kLlama3 only: wavelengths longer than original_max_position_embeddings / low_freq_factor are stretched by `factor`,
  // those shorter than … / high_freq_factor are kept, those between are blended.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 0;
};

struct LlamaConfig {
  std::string model_type = "llama";  // llama, mistral, qwen2 or qwen3: the name transformers knows it by
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  double initializer_range = 0.02;
  bool qkv_bias = false;
  bool output_bias = false;  // of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm over each head of q and k, before the rotation
  bool tie_word_embeddings = false;
  // Attention sees only so many positions back. Not implemented; harmless for sequences that are not longer, so it is
  // checked when a sequence arrives.
  std::optional<int64_t> sliding_window;
  std::optional<int64_t> bos_token_id;
  std::optional<int64_t> eos_token_id;

  // `source` names the text in messages: the path of the file, say.
  static LlamaConfig from_json(std::string_view text, std::string_view source = "config.json");
  static LlamaConfig from_file(const std::filesystem::path& config_json);

  // As transformers reads it (4.x and 5.x); `dtype` is a torch name, "float32" or "bfloat16".
  std::string to_json(std::string_view dtype = "float32") const;

  // Throws a UserError that lists every impossible value. from_json() has called it; for configurations made by hand.
  void validate(std::string_view source = "LlamaConfig") const;

  std::string architecture() const;  // "LlamaForCausalLM"
};

}  // namespace neap::models
