#include "neap/train/evaluation.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <filesystem>

#include "neap/comm/world.h"
#include "testing/error_of.h"
#include "testing/ranks.h"

namespace neap::train {
namespace {

// 13 tokens: three sequences of four.
constexpr const char* kText = "abcdefghijklm";

struct HeldOut {
  explicit HeldOut(std::optional<int64_t> end = std::nullopt, const char* text = kText) {
    std::string path = (std::filesystem::temp_directory_path() / "neap-eval-XXXXXX").string();
    const int descriptor = ::mkstemp(path.data());
    EXPECT_EQ(::write(descriptor, text, 13), 13);
    ::close(descriptor);
    file.emplace(TokenFile::open(path));
    std::filesystem::remove(path);
    sequences.emplace(*file, Sequences::Options{.length = 4, .shuffle = false, .seed = 0, .end_token = end});
  }

  // Of a token: the square of a weight that its label picks.
  at::Tensor loss(const at::Tensor& labels, double divisor) const {
    EXPECT_FALSE(at::GradMode::is_enabled());
    const at::Tensor counted = labels.masked_select(labels.ne(-100));
    return at::embedding(weight, counted).square().sum() / divisor;
  }

  double evaluate(int64_t batch, int64_t batches, comm::World* world = nullptr) const {
    TrainSection train;
    train.batch = batch;
    train.sequence = 4;
    train.eval_batches = batches;
    Evaluation evaluation(
        {.loss = [this](const at::Tensor&, const at::Tensor& labels, double divisor) { return loss(labels, divisor); },
         .sequences = *sequences,
         .device = device::Device::of(c10::kCPU),
         .world = world},
        train);
    return evaluation.loss();
  }

  // Over the labels of the first `count` sequences: tokens 1 to 4 · count.
  double expected(int64_t count) const {
    double total = 0;
    for (int64_t i = 1; i <= 4 * count; ++i) {
      const auto value = weight[static_cast<int64_t>(kText[i])].item<double>();
      total += value * value;
    }
    return total / static_cast<double>(4 * count);
  }

  at::Tensor weight = at::randn({256, 1});
  std::optional<TokenFile> file;
  std::optional<Sequences> sequences;
};

TEST(Evaluation, IsTheMeanOverTheTokensOfTheFileAndTheLastBatchMayBeShort) {
  const HeldOut data;
  EXPECT_NEAR(data.evaluate(1, 0), data.expected(3), 1e-6);
  EXPECT_NEAR(data.evaluate(2, 0), data.expected(3), 1e-6);
  EXPECT_NEAR(data.evaluate(8, 0), data.expected(3), 1e-6);
}

TEST(Evaluation, LabelsThatTheDataLeavesOutDoNotCount) {
  const HeldOut data('c');
  double total = 0;
  for (int64_t i = 1; i <= 12; ++i) {
    const auto value = data.weight[static_cast<int64_t>(kText[i])].item<double>();
    if (kText[i] != 'd') total += value * value;
  }
  EXPECT_NEAR(data.evaluate(2, 0), total / 11, 1e-6);
}

TEST(Evaluation, DataWithoutALabelThatCountsIsRefused) {
  const HeldOut data('c', "cccccccccabcd");
  EXPECT_GT(data.evaluate(1, 0), 0);
  EXPECT_THAT(testing::error_of([&] { data.evaluate(1, 2); }),
              ::testing::HasSubstr("[data.eval] expected labels that count in its first 2 sequences; found none"));
}

TEST(Evaluation, CanBeLimitedToTheFirstBatches) {
  const HeldOut data;
  EXPECT_NEAR(data.evaluate(1, 2), data.expected(2), 1e-6);
  EXPECT_NEAR(data.evaluate(2, 1), data.expected(2), 1e-6);
  EXPECT_NEAR(data.evaluate(1, 100), data.expected(3), 1e-6);
}

TEST(Evaluation, ChangesTheModelsModeWhileItMeasures) {
  const HeldOut data;
  torch::nn::Module model;
  int calls = 0;
  TrainSection train;
  train.sequence = 4;
  Evaluation evaluation({.model = &model,
                         .loss =
                             [&](const at::Tensor&, const at::Tensor& labels, double divisor) {
                               ++calls;
                               EXPECT_FALSE(model.is_training());
                               return data.loss(labels, divisor);
                             },
                         .sequences = *data.sequences,
                         .device = device::Device::of(c10::kCPU)},
                        train);
  evaluation.loss();
  EXPECT_GT(calls, 0);
  EXPECT_TRUE(model.is_training());
}

TEST(Evaluation, AnyNumberOfRanksMeasuresTheSameBits) {
  const HeldOut data;
  const double alone = data.evaluate(1, 0);
  for (const int ranks : {2, 4}) {
    testing::run_ranks(ranks, [&](comm::World& world) { EXPECT_EQ(data.evaluate(1, 0, &world), alone); });
  }
}

}  // namespace
}  // namespace neap::train
