// torch-free
#include "neap/models/llama_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A legal configuration with `extra` fields ("…": …,) in front, which win over nothing: keys are not repeated.
std::string json_of(const std::string& type, const std::string& architecture, const std::string& extra = "") {
  return R"({)" + extra + R"("model_type": ")" + type + R"(", "architectures": [")" + architecture + R"("],
    "vocab_size": 100, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2})";
}

std::string error_of(const std::string& json) {
  return testing::error_of([&] { LlamaConfig::from_json(json, "there/config.json"); });
}

TEST(LlamaConfig, ReadsALlamaOfTransformers4) {
  const LlamaConfig config = LlamaConfig::from_json(json_of("llama", "LlamaForCausalLM", R"(
      "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "rms_norm_eps": 1e-5,
      "tie_word_embeddings": true, "attention_bias": true, "eos_token_id": [7, 8], "torch_dtype": "bfloat16",)"));
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rope_theta, 500000.0);
  EXPECT_EQ(config.rope_scaling.type, RopeScaling::Type::kLlama3);
  EXPECT_EQ(config.rope_scaling.factor, 8.0);
  EXPECT_EQ(config.rope_scaling.original_max_position_embeddings, 8192);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_TRUE(config.output_bias);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_EQ(config.eos_token_id, 7);
}

TEST(LlamaConfig, ReadsTheRopeParametersOfTransformers5) {
  const LlamaConfig config = LlamaConfig::from_json(
      json_of("qwen3", "Qwen3ForCausalLM",
              R"("rope_parameters": {"rope_theta": 1000000, "rope_type": "linear", "factor": 2},)"));
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.rope_scaling.type, RopeScaling::Type::kLinear);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_FALSE(config.qkv_bias);
}

TEST(LlamaConfig, KnowsTheBiasesAndWindowsOfEachFamily) {
  const LlamaConfig qwen2 = LlamaConfig::from_json(
      json_of("qwen2", "Qwen2ForCausalLM", R"("use_sliding_window": false, "sliding_window": 16,)"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_EQ(qwen2.sliding_window, std::nullopt);
  EXPECT_EQ(LlamaConfig::from_json(json_of("mistral", "MistralForCausalLM")).sliding_window, 4096);
  EXPECT_EQ(
      LlamaConfig::from_json(json_of("mistral", "MistralForCausalLM", R"("sliding_window": null,)")).sliding_window,
      std::nullopt);
}

TEST(LlamaConfig, ListsEveryUnsupportedFieldAtOnce) {
  EXPECT_THAT(error_of(json_of("qwen2", "Qwen2ForCausalLM", R"("hidden_act": "gelu", "attention_dropout": 0.1,
      "rope_scaling": {"type": "yarn", "factor": 4}, "use_sliding_window": true, "sliding_window": 16,
      "quantization_config": {}, "rms_norm_eps": "small",)")),
              AllOf(HasSubstr("there/config.json"), HasSubstr("hidden_act 'gelu'"), HasSubstr("attention_dropout"),
                    HasSubstr("rope_scaling.rope_type 'yarn'"), HasSubstr("use_sliding_window"),
                    HasSubstr("quantization_config"), HasSubstr("rms_norm_eps has the wrong type: \"small\"")));
  EXPECT_THAT(error_of(R"({"model_type": "llama", "hidden_size": 8})"),
              AllOf(HasSubstr("vocab_size is missing"), HasSubstr("num_attention_heads is missing")));
}

TEST(LlamaConfig, RefusesUnknownArchitecturesAndNamesTheKnownOnes) {
  EXPECT_THAT(error_of(json_of("gemma", "GemmaForCausalLM")), AllOf(HasSubstr("'gemma'"), HasSubstr("qwen3")));
  EXPECT_THAT(error_of(json_of("llama", "LlamaForSequenceClassification")),
              HasSubstr("LlamaForSequenceClassification"));
  EXPECT_THAT(error_of(R"({"vocab_size": 3})"), HasSubstr("model_type ''"));
  EXPECT_THAT(error_of("[1]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of("{\"model_type\":"), HasSubstr("not JSON"));
}

TEST(LlamaConfig, ListsImpossibleSizes) {
  LlamaConfig config = LlamaConfig::from_json(json_of("llama", "LlamaForCausalLM"));
  config.num_key_value_heads = 4;
  config.head_dim = 7;
  config.vocab_size = 0;
  EXPECT_THAT(testing::error_of([&] { config.validate(); }),
              AllOf(HasSubstr("multiple of num_key_value_heads (4)"), HasSubstr("head_dim must be even"),
                    HasSubstr("vocab_size must be positive; found 0")));
}

TEST(LlamaConfig, IsReadBackFromWhatItWrites) {
  for (const auto& [type, architecture] : {std::pair{"llama", "LlamaForCausalLM"},
                                           {"mistral", "MistralForCausalLM"},
                                           {"qwen2", "Qwen2ForCausalLM"},
                                           {"qwen3", "Qwen3ForCausalLM"}}) {
    LlamaConfig config = LlamaConfig::from_json(json_of(type, architecture, R"("rope_theta": 1234.5, "head_dim": 10,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}, "bos_token_id": 3,)"));
    const std::string text = config.to_json("bfloat16");
    EXPECT_EQ(LlamaConfig::from_json(text).to_json("bfloat16"), text);
    EXPECT_EQ(LlamaConfig::from_json(text).head_dim, 10);
    EXPECT_EQ(LlamaConfig::from_json(text).sliding_window, config.sliding_window);
  }
}

TEST(LlamaConfig, AMissingFileIsNamed) {
  EXPECT_THAT(testing::error_of([] { LlamaConfig::from_file("/nowhere/config.json"); }),
              HasSubstr("/nowhere/config.json"));
}

}  // namespace
}  // namespace neap::models
