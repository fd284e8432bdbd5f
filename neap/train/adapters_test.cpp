// Runs that train adapters: the same bits with offload and recomputation, on one rank and on several, and nothing kept
// for what is frozen.
#include "neap/train/adapters.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/models/causal_lm.h"
#include "neap/models/hugging_face.h"
#include "neap/models/lora.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/adamw.h"
#include "neap/train/model_directory.h"
#include "neap/train/parallel.h"
#include "neap/train/run.h"
#include "testing/deepseek_config.h"
#include "testing/error_of.h"
#include "testing/llama_config.h"
#include "testing/ranks.h"
#include "testing/sim_fixture.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using ::testing::HasSubstr;

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

models::ModelConfig tiny() {
  models::ModelConfig config = testing::small_llama(/*vocabulary=*/256);
  config.tie_word_embeddings = true;
  return config;
}

class AdaptersTest : public testing::SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    std::string pattern = (fs::temp_directory_path() / "neap-adapters-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
    models::save_hf(*models::make_model(tiny(), {}, 3), dir_ / "model");
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 3000; ++i) text << static_cast<char>('a' + (i * 7919 % 1009) % 26);
  }
  void TearDown() override {
    fs::remove_all(dir_);
    SimTest::TearDown();
  }

  RunConfig config(const std::string& name) const {
    RunConfig config;
    config.model.path = (dir_ / "model").string();
    config.data.path = (dir_ / "text").string();
    config.lora.rank = 4;
    config.lora.modules = {"q_proj", "v_proj", "down_proj"};
    config.train.steps = 4;
    config.train.batch = 2;
    config.train.sequence = 16;
    config.optim.lr = 1e-2;
    config.optim.clip = 0;
    config.log.dir = (dir_ / name).string();
    return config;
  }
  std::vector<double> losses(const RunConfig& config, c10::Device device = c10::kCPU, const Ranks* ranks = nullptr) {
    std::ostringstream out;
    at::manual_seed(17);
    testing::sim_control().manual_seed(17, 0);
    const RunResult result = run(config, {.device = device, .out = out, .stop_requested = {}, .ranks = ranks});
    EXPECT_EQ(result.message, "");
    latest_ = result.summary;
    std::vector<double> losses;
    for (const StepMetrics& step : result.summary.steps) losses.push_back(step.loss);
    return losses;
  }
  std::string adapter(const std::string& name) const {
    return bytes_of(dir_ / name / "adapter" / "adapter_model.safetensors");
  }

  fs::path dir_;
  RunSummary latest_;
};

TEST_F(AdaptersTest, TrainingLowersTheLossAndLeavesTheModelAlone) {
  const std::string before = bytes_of(dir_ / "model" / "model.safetensors");
  RunConfig longer = config("out");
  longer.train.steps = 30;
  const std::vector<double> found = losses(longer);
  EXPECT_LT(found.back(), found.front() - 0.1);
  EXPECT_TRUE(bytes_of(dir_ / "model" / "model.safetensors") == before);
  EXPECT_THAT(bytes_of(dir_ / "out" / "adapter" / "adapter_config.json"), HasSubstr((dir_ / "model").string()));
}

TEST_F(AdaptersTest, OffloadAndRecomputationChangeNoBitAlsoWithDropout) {
  const auto variant = [&](const std::string& name, bool offloaded, bool recomputed) {
    RunConfig run = config(name);
    run.lora.dropout = 0.3;
    if (offloaded) run.offload.options = {.mode = offload::Mode::kAsync, .min_bytes = Bytes(0), .keep_last = 0};
    if (recomputed) run.recompute.mode = RecomputeMode::kFull;
    return losses(run, testing::sim());
  };
  const std::vector<double> plain = variant("plain", false, false);
  // Gradients and optimizer state are those of the adapters: three layers of q [32, 32], v [16, 32], down [32, 48].
  const int64_t trained = 3 * 4 * ((32 + 32) + (16 + 32) + (32 + 48));
  ASSERT_TRUE(latest_.steps.back().peak_parts.has_value());
  const int64_t frozen = 32 * 256 + 32 + 3 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48);
  EXPECT_EQ(latest_.steps.back().peak_parts->parameters.count, 4 * (frozen + trained));
  EXPECT_LE(latest_.steps.back().peak_parts->gradients.count, 4 * trained);
  EXPECT_LE(latest_.steps.back().peak_parts->optimizer.count, 8 * trained + 4 * 18);
  const std::string expected = adapter("plain");
  EXPECT_EQ(variant("offload", true, false), plain);
  EXPECT_GT(latest_.steps.back().offloaded_bytes, Bytes(0));
  EXPECT_EQ(variant("recompute", false, true), plain);
  EXPECT_GT(latest_.steps.back().reruns, 0);
  EXPECT_EQ(variant("both", true, true), plain);
  for (const char* name : {"offload", "recompute", "both"}) EXPECT_TRUE(adapter(name) == expected) << name;
}

TEST_F(AdaptersTest, ARunGoesOnFromAnAdapter) {
  losses(config("first"));
  RunConfig second = config("second");
  second.lora = {.adapter = (dir_ / "first" / "adapter").string()};
  const double begun = losses(second).front();
  RunConfig fresh = config("fresh");
  EXPECT_LT(begun, losses(fresh).front());
  EXPECT_FALSE(adapter("second") == adapter("first"));
}

TEST_F(AdaptersTest, SeveralRanksTrainTheAdapterOfOneProcess) {
  losses(config("before"));
  const auto variant = [&](const std::string& name, int which) {
    RunConfig run = config(name);
    if (which == 1) run.model.init = Init::kRandom;
    if (which == 2) run.lora = {.adapter = (dir_ / "before" / "adapter").string()};
    return run;
  };
  for (const int which : {0, 1, 2}) {
    SCOPED_TRACE(which);
    RunConfig alone = variant("alone", which);
    alone.train.accumulation = 2;
    const std::vector<double> expected = losses(alone);
    testing::run_ranks(2, [&](comm::World& world) {
      const RunConfig mine = variant("ranks", which);
      const Ranks ranks{.world = world, .mesh = mesh_of(mine.parallel, 2, world.rank())};
      std::ostringstream out;
      const RunResult result = run(mine, {.out = out, .stop_requested = {}, .ranks = &ranks});
      EXPECT_EQ(result.message, "");
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(result.summary.steps[i].loss, expected[i]) << i;
    });
    EXPECT_TRUE(adapter("ranks") == adapter("alone"));
  }
}

TEST_F(AdaptersTest, AResumedRunHasTheBitsOfOneThatNeverStopped) {
  RunConfig whole = config("whole");
  whole.lora.dropout = 0.3;
  whole.checkpoint.every = 2;
  const std::vector<double> expected = losses(whole);

  RunConfig broken = whole;
  broken.log.dir = (dir_ / "broken").string();
  int asked = 0;
  std::ostringstream out;
  at::manual_seed(17);
  const RunResult first = run(broken, {.out = out, .stop_requested = [&] { return ++asked > 2; }});
  EXPECT_EQ(first.summary.status, RunStatus::kInterrupted);
  broken.checkpoint.resume = "auto";
  EXPECT_EQ(losses(broken), std::vector<double>(expected.begin() + 2, expected.end()));
  EXPECT_TRUE(adapter("broken") == adapter("whole"));

  broken.lora.rank = 5;
  EXPECT_THAT(error_of([&] { losses(broken); }), HasSubstr("[lora.rank] expected 4, with which "));
  // What a checkpoint is converted to is the model, without the adapters beside it.
  checkpoint::Reader reader(*checkpoint::newest_checkpoint(dir_ / "whole" / "checkpoints"));
  convert_checkpoint(reader, dir_ / "converted");
  models::save_hf(*models::model_from_hf(dir_ / "converted"), dir_ / "again");  // in the model's order
  EXPECT_TRUE(bytes_of(dir_ / "again" / "model.safetensors") == bytes_of(dir_ / "model" / "model.safetensors"));
}

TEST_F(AdaptersTest, EvaluationsDropNothingAndDrawNothing) {
  RunConfig plain = config("plain");
  plain.lora.dropout = 0.3;
  const std::vector<double> expected = losses(plain);
  RunConfig evaluated = plain;
  evaluated.data.eval = plain.data.path;
  evaluated.train.eval_every = 1;
  EXPECT_EQ(losses(evaluated), expected);
  EXPECT_TRUE(latest_.steps.front().eval_loss.has_value());
}

// Experts' biases as well, which a run without adapters moves.
TEST_F(AdaptersTest, NothingOfAModelWithExpertsMoves) {
  fs::remove_all(dir_ / "model");
  models::save_hf(*models::make_model(testing::small_deepseek(/*vocabulary=*/256), {}, 3), dir_ / "model");
  RunConfig experts = config("experts");
  experts.lora.modules = {"all-linear"};
  experts.train.expert_bias_rate = 0.1;
  experts.checkpoint.export_model = true;
  const std::string before = bytes_of(dir_ / "model" / "model.safetensors");
  losses(experts);
  EXPECT_TRUE(bytes_of(dir_ / "experts" / "hf" / "model.safetensors") == before);
  fs::remove_all(dir_ / "experts");
  testing::run_ranks(2, [&](comm::World& world) {
    const Ranks ranks{.world = world, .mesh = mesh_of(experts.parallel, 2, world.rank())};
    std::ostringstream out;
    EXPECT_EQ(run(experts, {.out = out, .stop_requested = {}, .ranks = &ranks}).message, "");
  });
  EXPECT_TRUE(bytes_of(dir_ / "experts" / "hf" / "model.safetensors") == before);
}

TEST_F(AdaptersTest, PiecesOfFrozenParametersHaveNeitherGradientsNorState) {
  testing::run_ranks(2, [&](comm::World& world) {
    const auto model = models::make_model(tiny(), {}, 3);
    models::add_lora(*model, {.rank = 4, .modules = {"q_proj"}}, 1);
    int64_t trained = 0;
    for (const auto& [name, tensor] : models::lora_state(*model)) trained += tensor.numel();
    const comm::Mesh mesh(2, world.rank());
    shard::Sharded sharded = shard::fully_shard(*model, world.groups(mesh));
    AdamW optimizer(sharded.parameters(), {});
    const at::Tensor ids = at::full({1, 8}, 5, at::kLong);
    const at::Tensor loss = sharded.run([&] { return model->loss(ids, ids); });
    loss.backward();
    int64_t with_gradient = 0;
    for (const shard::Shard& shard : sharded.shards()) {
      EXPECT_TRUE(!shard.data.grad().defined() || models::is_lora_parameter(shard.name)) << shard.name;
    }
    for (const at::Tensor& parameter : optimizer.parameters()) {
      EXPECT_TRUE(parameter.requires_grad());
      with_gradient += parameter.numel();
    }
    EXPECT_LE(with_gradient, trained);
    EXPECT_LE(sharded.usage().gradients.count, 4 * trained);
    EXPECT_LE(optimizer.state_bytes().count, 8 * trained + 4 * 6);
  });
}

TEST_F(AdaptersTest, WhatDoesNotFitIsAnErrorBeforeTheFirstStep) {
  RunConfig wrong = config("wrong");
  wrong.lora.modules = {"query"};
  EXPECT_THAT(error_of([&] { losses(wrong); }), HasSubstr("[lora.modules] expected names of linear layers"));
  wrong = config("wrong");
  wrong.lora = {.adapter = (dir_ / "nowhere").string()};
  EXPECT_THAT(error_of([&] { losses(wrong); }), HasSubstr("[lora.adapter] expected a PEFT adapter directory"));
}

}  // namespace
}  // namespace neap::train
