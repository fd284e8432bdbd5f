// Layers that predict further tokens: which tokens count, what gets gradients, units, files, adapters. That the numbers
// are those of the report is shown against PyTorch (tests/parity).
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "neap/files/safetensors.h"
#include "neap/models/hugging_face.h"
#include "neap/models/inspect.h"
#include "neap/models/lora.h"
#include "neap/models/mixture_of_experts.h"
#include "neap/models/test_support.h"
#include "testing/deepseek_config.h"
#include "testing/error_of.h"

namespace neap::models {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

ModelConfig deepseek_with_mtp(int64_t depths, bool tied = false) {
  ModelConfig config = testing::small_deepseek(61);
  config.tie_word_embeddings = tied;
  config.mtp_layers = depths;
  config.with_mtp = depths > 0;
  return config;
}

// Every token that counts adds log(61): a head of zeros finds all of them equally likely.
double tokens_that_count(const ModelConfig& config, const Batch& batch) {
  const auto model = make_model(config);
  const at::NoGradGuard no_grad;
  model->named_parameters()["lm_head.weight"].zero_();
  return model->losses(batch.ids, batch.labels, {.divisor = 1}).further.item<double>() / std::log(61.0);
}

TEST(Mtp, DepthKPredictsTheTokenKPlacesLaterWhereEveryLabelOnTheWayCounts) {
  Batch batch;  // 2 × 9
  EXPECT_NEAR(tokens_that_count(deepseek_with_mtp(1), batch), 2 * 8, 1e-4);
  EXPECT_NEAR(tokens_that_count(deepseek_with_mtp(3), batch), 2 * (8 + 7 + 6) / 3.0, 1e-4);
  batch.labels[0][4] = -100;
  EXPECT_NEAR(tokens_that_count(deepseek_with_mtp(1), batch), 2 * 8 - 2, 1e-4);
  EXPECT_NEAR(tokens_that_count(deepseek_with_mtp(3), batch), (2 * (8 + 7 + 6) - (2 + 3 + 4)) / 3.0, 1e-4);
  batch.labels[1][8] = -100;  // the last of its row: nothing is read in its place
  EXPECT_NEAR(tokens_that_count(deepseek_with_mtp(1), batch), 2 * 8 - 3, 1e-4);
  const Batch one{.ids = batch.ids.narrow(1, 0, 1), .labels = batch.labels.narrow(1, 0, 1)};
  EXPECT_EQ(tokens_that_count(deepseek_with_mtp(2), one), 0);
}

TEST(Mtp, TheModelsOwnLossKeepsItsBits) {
  for (const bool tied : {false, true}) {
    const auto model = make_model(deepseek_with_mtp(2, tied), {}, 4);
    const Batch batch;
    const LossOptions options{.z_loss = 1e-3};
    EXPECT_TRUE(
        at::equal(model->losses(batch.ids, batch.labels, options).loss, model->loss(batch.ids, batch.labels, options)));
  }
}

TEST(Mtp, EveryParameterGetsAGradientAndNoTokenSeesLaterOnes) {
  for (const bool tied : {false, true}) {
    const auto model = make_model(deepseek_with_mtp(2, tied), {}, 4);
    const Batch batch;
    model->losses(batch.ids, batch.labels).further.backward();
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_GT(item.value().grad().abs().max().item<double>(), 0) << item.key();
    }
    EXPECT_EQ(model->expert_layers().size(), 2);
    EXPECT_EQ(model->expert_layers(/*further=*/true).size(), 4);
    // What is predicted from the first four tokens does not change with the sixth.
    const auto first_four = [&](int64_t sixth) {
      at::Tensor ids = batch.ids.clone(), labels = batch.labels.clone();
      ids.select(1, 6).fill_(sixth);
      labels.slice(1, 5).fill_(-100);  // depth 1 at 3 looks at labels 3 and 4, and reads token 4
      return model->losses(ids, labels).further;
    };
    EXPECT_TRUE(at::equal(first_four(3), first_four(30)));
  }
}

TEST(Mtp, AreUnitsAmongTheLayers) {
  const auto model = make_model(deepseek_with_mtp(1));
  std::set<std::string> units;
  for (const auto& item : model->named_modules()) {
    if (dynamic_cast<autograd::Hookable*>(item.value().get()) != nullptr) units.insert(item.key());
  }
  for (const char* unit : {"model.layers.3", "model.layers.3.self_attn", "model.layers.3.mlp"})
    EXPECT_TRUE(units.contains(unit)) << unit;
  EXPECT_EQ(make_model(deepseek_with_mtp(0))->mtp_layers().size(), 0);
  ModelConfig none = testing::small_deepseek(61);
  none.with_mtp = true;
  EXPECT_THAT(error_of([&] { make_model(none); }), HasSubstr("num_nextn_predict_layers names none"));
}

// Files
// ----------------------------------------------------------------------------------------------------------------

class MtpFiles : public FilesTest {};

TEST_F(MtpFiles, HaveTheNamesAndCopiesOfThePublishedOnesAndAreReadBackBitForBit) {
  for (const bool tied : {false, true}) {
    const auto model = make_model(deepseek_with_mtp(1, tied), {}, 3);
    save_hf(*model, dir_);
    const files::SafetensorsFile file(dir_ / "model.safetensors");
    std::set<std::string> names;
    for (const files::SafeTensorInfo& info : file.tensors()) names.insert(info.name);
    for (const char* name :
         {"embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
          "shared_head.head.weight", "self_attn.o_proj.weight", "mlp.experts.7.up_proj.weight"}) {
      EXPECT_THAT(names, Contains("model.layers.3." + std::string(name)));
    }
    const auto read = model_from_hf(dir_, {}, /*with_mtp=*/true);
    const auto parameters = read->named_parameters();
    EXPECT_EQ(parameters.size(), model->named_parameters().size());
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), parameters[item.key()])) << item.key();
    EXPECT_EQ(read->config().to_json(), model->config().to_json());
    EXPECT_THAT(model->config().to_json(), HasSubstr("\"num_nextn_predict_layers\": 1"));
    EXPECT_EQ(warnings_, "");
  }
}

TEST_F(MtpFiles, AModelWithoutThemLeavesThemOutWithAWarning) {
  save_hf(*make_model(deepseek_with_mtp(1)), dir_);
  const auto model = model_from_hf(dir_);
  EXPECT_EQ(model->mtp_layers().size(), 0);
  EXPECT_THAT(warnings_, AllOf(HasSubstr("44 tensors of layers that predict further tokens"), HasSubstr("model.mtp")));
  EXPECT_THAT(model->config().to_json(), HasSubstr("\"num_nextn_predict_layers\": 0"));
}

TEST_F(MtpFiles, CopiesThatDifferAndLayersThatAreNotThereAreErrors) {
  ModelConfig longer = testing::small_deepseek(61);
  save_hf(*make_model(longer), dir_);
  const auto model = make_model(deepseek_with_mtp(1));
  EXPECT_THAT(
      error_of([&] { load_hf(*model, dir_); }),
      AllOf(HasSubstr("num_nextn_predict_layers: 1"), HasSubstr("found none, as transformers leaves them out")));
  std::vector<HfTensor> tensors;
  for (const auto& item : model->named_parameters()) {
    for (auto& tensor :
         hf_tensors({item.key(), at::kFloat, item.value().sizes().vec(), [value = item.value()] { return value; }}))
      tensors.push_back(std::move(tensor));
  }
  for (const auto& item : model->named_buffers())
    tensors.push_back({item.key(), at::kFloat, item.value().sizes().vec(), [value = item.value()] { return value; }});
  const std::size_t without_copies = tensors.size();
  save_hf(model->config().to_json(), tensors, dir_);
  load_hf(*model, dir_);  // what is shared need not be there twice
  add_hf_copies(tensors, model->config());
  ASSERT_EQ(tensors.size(), without_copies + 2);
  tensors.back().make = [] { return at::zeros({61, 32}); };
  save_hf(model->config().to_json(), tensors, dir_);
  EXPECT_THAT(
      error_of([&] { load_hf(*model, dir_); }),
      AllOf(HasSubstr("expected model.layers.3.shared_head.head.weight to be lm_head.weight again; they differ"),
            HasSubstr("model.mtp: off")));
}

TEST_F(MtpFiles, AreCountedApart) {
  save_hf(*make_model(deepseek_with_mtp(1)), dir_);
  const Inspection with = inspect_hf(dir_);
  EXPECT_EQ(with.kinds.back().name, "mtp");
  EXPECT_EQ(with.kinds.back().tensors, 44);
  EXPECT_THAT(to_text(with), HasSubstr("3 for a token; 1 behind them that predict further tokens (model.mtp)"));
  const int64_t per_token = with.parameters_per_token();
  save_hf(*make_model(deepseek_with_mtp(0)), dir_);
  const Inspection without = inspect_hf(dir_);
  EXPECT_EQ(without.parameters_per_token(), per_token);
  EXPECT_EQ(without.total().parameters + with.kinds.back().parameters, with.total().parameters);
  EXPECT_EQ(warnings_, "");
}

TEST(MtpAdapters, StandOnlyWhereALayersNumberAsksForThem) {
  const auto adapted = [](const std::vector<std::string>& modules) {
    const auto model = make_model(deepseek_with_mtp(1));
    return add_lora(*model, {.rank = 2, .modules = modules}, 1);
  };
  for (const char* general : {"all-linear", "o_proj", "model.layers.{*}.self_attn.o_proj"})
    EXPECT_THAT(adapted({general}), Each(Not(StartsWith("model.layers.3.")))) << general;
  EXPECT_THAT(adapted({"o_proj", "model.layers.3.self_attn.o_proj"}), Contains("model.layers.3.self_attn.o_proj"));
  EXPECT_THAT(error_of([&] { adapted({"eh_proj"}); }), HasSubstr("expected such as model.layers.3.eh_proj"));
}

}  // namespace
}  // namespace neap::models
