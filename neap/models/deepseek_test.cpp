// A whole DeepSeek-V3: names, units, gradients, files. That its numbers are right is shown against transformers
// (tests/parity).
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/base/error.h"
#include "neap/files/safetensors.h"
#include "neap/models/hugging_face.h"
#include "neap/models/mixture_of_experts.h"
#include "neap/models/test_support.h"
#include "testing/deepseek_config.h"
#include "testing/error_of.h"

namespace neap::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::shared_ptr<CausalLM> tiny_deepseek(uint64_t seed = 0) { return make_model(testing::small_deepseek(61), {}, seed); }

TEST(Deepseek, HasTheNamesOfTransformers) {
  const auto model = tiny_deepseek();
  std::set<std::string> names;
  for (const auto& item : model->named_parameters()) names.insert(item.key());
  EXPECT_THAT(names, IsSupersetOf({"model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.mlp.up_proj.weight",
                                   "model.layers.2.self_attn.kv_a_proj_with_mqa.weight",
                                   "model.layers.1.self_attn.kv_a_layernorm.weight", "model.layers.1.mlp.gate.weight",
                                   "model.layers.1.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj",
                                   "model.layers.2.mlp.shared_experts.gate_proj.weight"}));
  EXPECT_EQ(names.size(), 3 + 3 * (2 + 7) + 3 + 2 * (1 + 2 + 3));
  std::set<std::string> buffers;
  for (const auto& item : model->named_buffers()) buffers.insert(item.key());
  EXPECT_EQ(buffers, (std::set<std::string>{"model.layers.1.mlp.gate.e_score_correction_bias",
                                            "model.layers.2.mlp.gate.e_score_correction_bias"}));
  EXPECT_EQ(model->expert_layers().size(), 2);
}

TEST(Deepseek, LayersAttentionAndMlpsAreUnits) {
  std::set<std::string> units;
  for (const auto& item : tiny_deepseek()->named_modules()) {
    if (dynamic_cast<autograd::Hookable*>(item.value().get()) != nullptr) units.insert(item.key());
  }
  EXPECT_THAT(units, IsSupersetOf({"model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.2",
                                   "model.layers.2.self_attn", "model.layers.2.mlp"}));
}

TEST(Deepseek, RunsInBfloat16WithABiasInFloat32) {
  const auto model = make_model(testing::small_deepseek(61), at::kBFloat16);
  EXPECT_EQ(model->buffers().front().scalar_type(), at::kFloat);
  const Batch batch;
  const at::Tensor loss = model->loss(batch.ids, batch.labels);
  loss.backward();
  EXPECT_NEAR(loss.item<double>(), std::log(61.0), 0.3);
  EXPECT_EQ(model->parameters().back().grad().scalar_type(), at::kBFloat16);
}

TEST(Deepseek, ABiasMovesTokensAndReceivesNoGradient) {
  const auto model = tiny_deepseek();
  const Batch batch;
  MixtureOfExperts& mixture = *model->expert_layers().front();
  const auto share_of_third = [&] {
    mixture.take_load();
    model->loss(batch.ids, batch.labels).backward();
    return mixture.take_load().at(3);
  };
  const int64_t before = share_of_third();
  mixture.router().e_score_correction_bias[3].fill_(10);
  EXPECT_LT(before, 18);
  EXPECT_EQ(share_of_third(), 18);
  EXPECT_FALSE(mixture.router().e_score_correction_bias.grad().defined());
}

TEST(Deepseek, BuffersOfAModelWithoutMemoryGetSome) {
  CausalLM model(testing::small_deepseek(61), at::TensorOptions(at::kMeta));
  EXPECT_TRUE(model.buffers().front().is_meta());
  model.place_buffers(at::kCPU);
  for (const at::Tensor& buffer : model.buffers()) EXPECT_TRUE(at::equal(buffer, at::zeros({8})));
  EXPECT_TRUE(model.buffers().front().is_same(model.expert_layers().front()->router().e_score_correction_bias));
  EXPECT_TRUE(model.parameters().front().is_meta());
}

// Files
// ----------------------------------------------------------------------------------------------------------------

class DeepseekFiles : public FilesTest {};

TEST_F(DeepseekFiles, HaveEachExpertOnItsOwnAndAreReadBackBitForBit) {
  const auto model = tiny_deepseek(3);
  {
    const at::NoGradGuard no_grad;
    model->expert_layers()[1]->router().e_score_correction_bias.normal_();
  }
  for (const int64_t max_shard : {int64_t{1} << 30, int64_t{30000}}) {
    save_hf(*model, dir_, {.max_shard = Bytes(max_shard)});
    const auto read = model_from_hf(dir_);
    const auto parameters = read->named_parameters();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), parameters[item.key()])) << item.key();
    const auto buffers = read->named_buffers();
    for (const auto& item : model->named_buffers())
      EXPECT_TRUE(at::equal(item.value(), buffers[item.key()])) << item.key();
    EXPECT_EQ(read->config().to_json(), model->config().to_json());
    const Batch batch;
    EXPECT_TRUE(at::equal(model->loss(batch.ids, batch.labels), read->loss(batch.ids, batch.labels)));
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ / "model.safetensors"));
  save_hf(*model, dir_);
  std::set<std::string> names;
  const files::SafetensorsFile file(dir_ / "model.safetensors");
  for (const files::SafeTensorInfo& info : file.tensors()) names.insert(info.name);
  EXPECT_THAT(
      names, IsSupersetOf(
                 {"model.layers.1.mlp.experts.0.gate_proj.weight", "model.layers.1.mlp.experts.7.up_proj.weight",
                  "model.layers.2.mlp.experts.3.down_proj.weight", "model.layers.2.mlp.gate.e_score_correction_bias"}));
  EXPECT_EQ(warnings_, "");
}

TEST_F(DeepseekFiles, EveryTensorThatDoesNotFitIsListed) {
  save_hf(*tiny_deepseek(), dir_);
  ModelConfig other = testing::small_deepseek(61);
  other.experts->count = 12;
  other.experts->intermediate_size = 24;
  const auto model = make_model(other);
  EXPECT_THAT(testing::error_of([&] { load_hf(*model, dir_); }),
              AllOf(HasSubstr("missing: model.layers.1.mlp.experts.11.down_proj.weight"),
                    HasSubstr("misshapen: model.layers.2.mlp.experts.0.up_proj.weight is [20, 32], expected [24, 32]"),
                    HasSubstr("misshapen: model.layers.1.mlp.gate.e_score_correction_bias is [8], expected [12]")));
}

}  // namespace
}  // namespace neap::models
