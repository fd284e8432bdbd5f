// torch-free
#include "neap/models/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "neap/base/error.h"
#include "testing/error_of.h"
#include "testing/nested_json.h"

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

std::string error_of_config(const std::string& json) {
  return testing::error_of([&] { ModelConfig::from_json(json, "there/config.json"); });
}

TEST(ModelConfig, ReadsALlamaOfTransformers4) {
  const ModelConfig config = ModelConfig::from_json(json_of("llama", "LlamaForCausalLM", R"(
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

TEST(ModelConfig, ReadsTheRopeParametersOfTransformers5) {
  const ModelConfig config = ModelConfig::from_json(
      json_of("qwen3", "Qwen3ForCausalLM",
              R"("rope_parameters": {"rope_theta": 1000000, "rope_type": "linear", "factor": 2},)"));
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.rope_scaling.type, RopeScaling::Type::kLinear);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_FALSE(config.qkv_bias);
  // Of a file that has both, transformers reads one.
  const ModelConfig both = ModelConfig::from_json(
      json_of("llama", "LlamaForCausalLM",
              R"("rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1000000},)"));
  EXPECT_EQ(both.rope_theta, 1e4);
  EXPECT_EQ(both.rope_scaling.factor, 2);
  EXPECT_THAT(error_of_config(json_of("qwen3", "Qwen3ForCausalLM",
                                      R"("rope_parameters": {"full_attention": {"rope_theta": 1000000}},)")),
              HasSubstr("rope_parameters of its own for 'full_attention' is not supported"));
}

TEST(ModelConfig, KnowsTheBiasesAndWindowsOfEachFamily) {
  const ModelConfig qwen2 = ModelConfig::from_json(
      json_of("qwen2", "Qwen2ForCausalLM", R"("use_sliding_window": false, "sliding_window": 16,)"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_EQ(qwen2.sliding_window, std::nullopt);
  EXPECT_EQ(ModelConfig::from_json(json_of("mistral", "MistralForCausalLM")).sliding_window, 4096);
  EXPECT_EQ(
      ModelConfig::from_json(json_of("mistral", "MistralForCausalLM", R"("sliding_window": null,)")).sliding_window,
      std::nullopt);
}

TEST(ModelConfig, WithoutALengthEachFamilyHasItsOwn) {
  // Yarn stretches from it.
  constexpr const char* kYarn = R"("max_position_embeddings": null, "rope_scaling": {"type": "yarn", "factor": 4},)";
  for (const auto& [type, architecture, positions] : {std::tuple{"llama", "LlamaForCausalLM", 2048},
                                                      {"mistral", "MistralForCausalLM", 131072},
                                                      {"qwen2", "Qwen2ForCausalLM", 32768},
                                                      {"qwen3", "Qwen3ForCausalLM", 32768}}) {
    const ModelConfig config = ModelConfig::from_json(json_of(type, architecture, kYarn));
    EXPECT_EQ(config.max_position_embeddings, positions) << type;
    EXPECT_EQ(config.rope_scaling.original_max_position_embeddings, positions) << type;
  }
  // One that stands outside of the object wins.
  const ModelConfig outside = ModelConfig::from_json(
      json_of("llama", "LlamaForCausalLM", R"("original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn",
      "factor": 4, "original_max_position_embeddings": 16},)"));
  EXPECT_EQ(outside.rope_scaling.original_max_position_embeddings, 64);
}

TEST(ModelConfig, ListsEveryUnsupportedFieldAtOnce) {
  EXPECT_THAT(error_of_config(json_of("qwen2", "Qwen2ForCausalLM", R"("hidden_act": "gelu", "attention_dropout": 0.1,
      "rope_scaling": {"type": "dynamic", "factor": 4}, "use_sliding_window": true, "sliding_window": 16,
      "quantization_config": {}, "rms_norm_eps": "small",)")),
              AllOf(HasSubstr("there/config.json"), HasSubstr("hidden_act 'gelu'"), HasSubstr("attention_dropout"),
                    HasSubstr("rope_scaling.rope_type 'dynamic'"), HasSubstr("use_sliding_window"),
                    HasSubstr("quantization_config"), HasSubstr("rms_norm_eps has the wrong type: \"small\"")));
  EXPECT_THAT(error_of_config(R"({"model_type": "llama", "hidden_size": 8})"),
              AllOf(HasSubstr("vocab_size is missing"), HasSubstr("num_attention_heads is missing")));
}

TEST(ModelConfig, RefusesUnknownArchitecturesAndNamesTheKnownOnes) {
  EXPECT_THAT(error_of_config(json_of("gemma", "GemmaForCausalLM")), AllOf(HasSubstr("'gemma'"), HasSubstr("qwen3")));
  EXPECT_THAT(error_of_config(json_of("llama", "LlamaForSequenceClassification")),
              HasSubstr("LlamaForSequenceClassification"));
  EXPECT_THAT(error_of_config(R"({"vocab_size": 3})"), HasSubstr("model_type ''"));
  EXPECT_THAT(error_of_config("[1]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of_config("{\"model_type\":"), HasSubstr("not JSON"));
  EXPECT_THAT(error_of_config("{\"model_type\":" + testing::nested_json(1'000'000) + "}"), HasSubstr("not JSON"));
}

std::string deepseek_of(const std::string& extra) {
  return R"({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 100,
      "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
      "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
      "moe_intermediate_size": 20, )" +
         extra + "}";
}

TEST(ModelConfig, ReadsADeepseek) {
  const ModelConfig config = ModelConfig::from_json(deepseek_of(R"("q_lora_rank": null, "n_routed_experts": 16,
      "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
      "routed_scaling_factor": 1.5, "rope_interleave": false, "head_dim": 17, "num_nextn_predict_layers": 1,
      "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
      "mscale_all_dim": 1.0, "original_max_position_embeddings": 64})"));
  ASSERT_TRUE(config.latent_attention && config.experts);
  EXPECT_EQ(config.latent_attention->q_lora_rank, std::nullopt);
  EXPECT_EQ(config.latent_attention->qk_head_dim(), 20);
  EXPECT_FALSE(config.latent_attention->rope_interleave);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.num_key_value_heads, 6);
  EXPECT_EQ(config.experts->count, 16);
  EXPECT_EQ(config.experts->groups_per_token, 2);
  EXPECT_EQ(config.experts->shared, 2);
  EXPECT_EQ(config.experts->routed_scaling_factor, 1.5);
  EXPECT_FALSE(config.has_experts(0));
  EXPECT_TRUE(config.has_experts(1));
  EXPECT_EQ(config.mtp_layers, 1);
  // cos and sin stay, the softmax becomes sharper by (0.1 ln 40 + 1)².
  EXPECT_EQ(config.rope_scaling.table_factor(), 1.0);
  EXPECT_NEAR(config.rope_scaling.softmax_factor(), 1.8738, 1e-4);
}

TEST(ModelConfig, FillsInWhatTransformersAssumesOfADeepseek) {
  const ModelConfig config = ModelConfig::from_json(deepseek_of(R"("q_lora_rank": 24, "n_routed_experts": 256)"));
  EXPECT_EQ(config.latent_attention->q_lora_rank, 24);
  EXPECT_TRUE(config.latent_attention->rope_interleave);
  EXPECT_EQ(config.experts->per_token, 8);
  EXPECT_EQ(config.experts->groups, 8);
  EXPECT_EQ(config.experts->groups_per_token, 4);
  EXPECT_EQ(config.experts->first_layer, 3);
  EXPECT_EQ(config.experts->routed_scaling_factor, 2.5);
  EXPECT_EQ(config.max_position_embeddings, 4096);
}

TEST(ModelConfig, ListsWhatIsWrongWithADeepseek) {
  EXPECT_THAT(
      error_of_config(deepseek_of(R"("scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2,
      "attention_dropout": 0.1)")),
      AllOf(HasSubstr("scoring_func 'softmax' is not supported (sigmoid is)"), HasSubstr("topk_method 'greedy'"),
            HasSubstr("moe_layer_freq other than 1"), HasSubstr("n_routed_experts is missing"),
            HasSubstr("q_lora_rank is missing"), HasSubstr("attention_dropout other than 0")));
  EXPECT_THAT(error_of_config(deepseek_of(R"("q_lora_rank": 0, "n_routed_experts": 10, "n_group": 4, "topk_group": 5,
      "num_key_value_heads": 3, "n_shared_experts": 0)")),
              AllOf(HasSubstr("q_lora_rank must be positive; found 0"),
                    HasSubstr("n_routed_experts (10) must be n_group (4) times 2 or more"),
                    HasSubstr("topk_group must be at most n_group (4); found 5"),
                    HasSubstr("num_key_value_heads must be num_attention_heads (6)"),
                    HasSubstr("n_shared_experts must be positive")));
  EXPECT_THAT(error_of_config(deepseek_of(R"("q_lora_rank": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 1,
      "num_experts_per_tok": 3)")),
              HasSubstr("num_experts_per_tok must be at most 2, the experts of topk_group groups; found 3"));
}

TEST(ModelConfig, OnlyADeepseekHasLatentAttentionAndExperts) {
  ModelConfig config = ModelConfig::from_json(json_of("llama", "LlamaForCausalLM"));
  config.experts = ExpertsConfig{.count = 4, .per_token = 2, .intermediate_size = 8};
  EXPECT_THAT(testing::error_of([&] { config.validate(); }), HasSubstr("belong to model_type 'deepseek_v3'"));
}

TEST(ModelConfig, ADeepseekIsReadBackFromWhatItWrites) {
  for (const char* rank : {"24", "null"}) {
    const ModelConfig config = ModelConfig::from_json(deepseek_of(std::string(R"("q_lora_rank": )") + rank + R"(,
        "n_routed_experts": 16, "norm_topk_prob": false, "attention_bias": true, "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4, "beta_fast": 30, "truncate": false,
        "attention_factor": 1.25, "original_max_position_embeddings": 64})"));
    const std::string text = config.to_json();
    const ModelConfig again = ModelConfig::from_json(text);
    EXPECT_EQ(again.to_json(), text);
    EXPECT_EQ(again.latent_attention->q_lora_rank, config.latent_attention->q_lora_rank);
    EXPECT_EQ(again.rope_scaling.table_factor(), 1.25);
    EXPECT_FALSE(again.rope_scaling.truncate);
    EXPECT_FALSE(again.experts->norm_topk_prob);
    EXPECT_TRUE(again.qkv_bias);
    EXPECT_EQ(again.mtp_layers, 0) << "their weights are not written";
    ModelConfig with = config;
    with.with_mtp = true;
    EXPECT_EQ(ModelConfig::from_json(with.to_json()).mtp_layers, 1);
  }
}

TEST(ModelConfig, ListsImpossibleSizes) {
  ModelConfig config = ModelConfig::from_json(json_of("llama", "LlamaForCausalLM"));
  config.num_key_value_heads = 4;
  config.head_dim = 7;
  config.vocab_size = 0;
  EXPECT_THAT(testing::error_of([&] { config.validate(); }),
              AllOf(HasSubstr("multiple of num_key_value_heads (4)"), HasSubstr("head_dim must be even"),
                    HasSubstr("vocab_size must be positive; found 0")));
  // What is made of sizes has to be a number, and a model of so many layers would never be there.
  config.hidden_size = int64_t{1} << 60;
  config.num_hidden_layers = 1'000'000'000;
  EXPECT_THAT(testing::error_of([&] { config.validate(); }),
              AllOf(HasSubstr("hidden_size must be at most 1048576; found 1152921504606846976"),
                    HasSubstr("num_hidden_layers must be at most 16384; found 1000000000")));
}

TEST(ModelConfig, IsReadBackFromWhatItWrites) {
  for (const auto& [type, architecture] : {std::pair{"llama", "LlamaForCausalLM"},
                                           {"mistral", "MistralForCausalLM"},
                                           {"qwen2", "Qwen2ForCausalLM"},
                                           {"qwen3", "Qwen3ForCausalLM"}}) {
    ModelConfig config = ModelConfig::from_json(json_of(type, architecture, R"("rope_theta": 1234.5, "head_dim": 10,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}, "bos_token_id": 3,)"));
    const std::string text = config.to_json("bfloat16");
    EXPECT_EQ(ModelConfig::from_json(text).to_json("bfloat16"), text);
    EXPECT_EQ(ModelConfig::from_json(text).head_dim, 10);
    EXPECT_EQ(ModelConfig::from_json(text).sliding_window, config.sliding_window);
  }
}

TEST(ModelConfig, AMissingFileIsNamed) {
  EXPECT_THAT(testing::error_of([] { ModelConfig::from_file("/nowhere/config.json"); }),
              HasSubstr("/nowhere/config.json"));
}

}  // namespace
}  // namespace neap::models
