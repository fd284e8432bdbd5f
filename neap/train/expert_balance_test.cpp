#include "neap/train/expert_balance.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "neap/models/causal_lm.h"
#include "neap/models/mixture_of_experts.h"
#include "testing/deepseek_config.h"
#include "testing/matchers.h"
#include "testing/ranks.h"

namespace neap::train {
namespace {

std::shared_ptr<models::CausalLM> deepseek() { return models::make_model(testing::small_deepseek(61), {}, 3); }

// Forward passes count, backward does not.
void run(models::CausalLM& model, int64_t batch) {
  model.hidden((at::arange(2 * 16, at::kLong) * 7 + batch * 13).remainder(61).view({2, 16}));
}

std::vector<at::Tensor> biases(const models::CausalLM& model) {
  std::vector<at::Tensor> all;
  for (models::MixtureOfExperts* layer : model.expert_layers()) {
    all.push_back(layer->router().e_score_correction_bias.clone());
  }
  return all;
}

TEST(ExpertBalance, MovesEachBiasTowardsTheMean) {
  const auto model = deepseek();
  ExpertBalance balance(model->expert_layers(), 0.25, nullptr);
  balance.begin_step();
  run(*model, 0);
  const auto load = balance.end_step(true);
  ASSERT_EQ(load.size(), 2);
  const auto after = biases(*model);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    ASSERT_EQ(std::accumulate(load[layer].begin(), load[layer].end(), int64_t{0}), 32 * 3);
    for (std::size_t expert = 0; expert < 8; ++expert) {
      const int64_t own = load[layer][expert], mean = 12;
      const double expected = own > mean ? -0.25 : own < mean ? 0.25 : 0;
      EXPECT_EQ(after[layer][static_cast<int64_t>(expert)].item<double>(), expected) << layer << ' ' << expert;
    }
  }
}

TEST(ExpertBalance, LeavesBiasesAloneWithoutAnUpdateAndForgetsAFailedStep) {
  const auto model = deepseek();
  ExpertBalance balance(model->expert_layers(), 0.25, nullptr);
  run(*model, 0);
  balance.begin_step();
  run(*model, 1);
  const auto load = balance.end_step(false);
  EXPECT_EQ(std::accumulate(load[0].begin(), load[0].end(), int64_t{0}), 32 * 3) << "one forward";
  for (const at::Tensor& bias : biases(*model)) EXPECT_TRUE(at::equal(bias, at::zeros({8})));
  ExpertBalance off(model->expert_layers(), 0, nullptr);
  run(*model, 0);
  off.end_step(true);
  for (const at::Tensor& bias : biases(*model)) EXPECT_TRUE(at::equal(bias, at::zeros({8})));
}

TEST(ExpertBalance, CountsOverRanksAsOverMicroBatches) {
  const auto alone = deepseek();
  ExpertBalance::Load expected;
  {
    ExpertBalance balance(alone->expert_layers(), 1e-3, nullptr);
    for (int64_t step = 0; step < 3; ++step) {
      run(*alone, 2 * step), run(*alone, 2 * step + 1);
      expected = balance.end_step(true);
    }
  }
  std::vector<std::shared_ptr<models::CausalLM>> models = {deepseek(), deepseek()};
  std::vector<ExpertBalance::Load> loads(2);
  testing::run_ranks(2, [&](comm::World& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    ExpertBalance balance(models[rank]->expert_layers(), 1e-3, &world);
    for (int64_t step = 0; step < 3; ++step) {
      run(*models[rank], 2 * step + world.rank());
      loads[rank] = balance.end_step(true);
    }
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(loads[rank], expected);
    EXPECT_TRUE(testing::bit_equal(biases(*models[rank]), biases(*alone))) << rank;
  }
}

// What it is for: an expert that everybody prefers is left by most, though no gradient says so.
TEST(ExpertBalance, EvensOutTheLoad) {
  const auto model = deepseek();
  for (models::MixtureOfExperts* layer : model->expert_layers()) layer->router().e_score_correction_bias[2].fill_(0.5);
  ExpertBalance balance(model->expert_layers(), 0.01, nullptr);
  const auto largest = [&](int64_t step) {
    for (int64_t i = 0; i < 4; ++i) run(*model, 4 * step + i);
    int64_t most = 0;
    for (const auto& layer : balance.end_step(true)) most = std::max(most, *std::ranges::max_element(layer));
    return most;
  };
  const int64_t before = largest(0);
  for (int64_t step = 1; step < 100; ++step) largest(step);
  EXPECT_EQ(before, 128) << "every token of four passes; the mean is 48";
  EXPECT_LT(largest(0), 96);
}

}  // namespace
}  // namespace neap::train
