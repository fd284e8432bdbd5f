// AdamW, SGD and clipping against PyTorch's own classes.
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "neap/train/adamw.h"
#include "neap/train/clip.h"
#include "neap/train/sgd.h"

namespace neap::train {
namespace {

std::vector<at::Tensor> random_parameters() {
  std::vector<at::Tensor> out;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{7, 5}, {33}, {64, 3, 2}, {1}}) {
    out.push_back(at::randn(shape).set_requires_grad(true));
  }
  return out;
}

std::vector<at::Tensor> copy_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& parameter : parameters) out.push_back(parameter.detach().clone().set_requires_grad(true));
  return out;
}

void set_random_gradients(std::vector<at::Tensor>& a, std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    a[i].mutable_grad() = at::randn(a[i].sizes());
    b[i].mutable_grad() = a[i].grad().clone();
  }
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, (a[i] - b[i]).abs().max().item<double>());
  return worst;
}

TEST(AdamW, AgreesWithTorchOptimWithinRounding) {
  std::vector<at::Tensor> ours = random_parameters();
  std::vector<at::Tensor> theirs = copy_of(ours);
  AdamW adamw(ours, {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .decay = Decay::kAll});
  torch::optim::AdamW reference(theirs,
                                torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1));
  for (int step = 0; step < 10; ++step) {
    set_random_gradients(ours, theirs);
    adamw.step(1e-2);
    reference.step();
  }
  EXPECT_LT(largest_difference(ours, theirs), 1e-6);
  EXPECT_GT(largest_difference(ours, random_parameters()), 1e-2);
}

// Pieces of parameters have one dimension, whatever the parameter has.
TEST(AdamW, MatricesDecayInPiecesToo) {
  std::vector<at::Tensor> whole = random_parameters();
  std::vector<at::Tensor> flat;
  std::vector<int64_t> dimensions;
  for (const at::Tensor& parameter : whole) {
    flat.push_back(parameter.detach().flatten().clone().set_requires_grad(true));
    dimensions.push_back(parameter.dim());
  }
  AdamW ours(whole, {.decay = Decay::kMatrices});
  AdamW pieces(flat, {.decay = Decay::kMatrices}, dimensions);
  for (size_t i = 0; i < whole.size(); ++i) {
    whole[i].mutable_grad() = at::randn(whole[i].sizes());
    flat[i].mutable_grad() = whole[i].grad().flatten().clone();
  }
  ours.step(1e-2);
  pieces.step(1e-2);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(whole[i].flatten(), flat[i])) << i;
}

TEST(AdamW, IsBitEqualToTheFusedOperatorCalledPerTensor) {
  std::vector<at::Tensor> ours = random_parameters();
  std::vector<at::Tensor> theirs = copy_of(ours);
  AdamW adamw(ours, {});
  std::vector<at::Tensor> mean;
  std::vector<at::Tensor> square;
  for (const at::Tensor& parameter : theirs) {
    mean.push_back(at::zeros_like(parameter.detach()));
    square.push_back(at::zeros_like(parameter.detach()));
  }
  for (int step = 1; step <= 3; ++step) {
    set_random_gradients(ours, theirs);
    adamw.step(1e-2);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < theirs.size(); ++i) {
      const at::Tensor count = at::full({}, step, at::kFloat);
      at::_fused_adamw_({theirs[i]}, {theirs[i].grad()}, {mean[i]}, {square[i]}, {}, {count}, 1e-2, 0.9, 0.95, 0.1,
                        1e-8, false, false);
    }
  }
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], theirs[i]));
}

TEST(AdamW, MatricesAloneDecayOnRequest) {
  const at::Tensor matrix = at::full({2, 2}, 1.0F).set_requires_grad(true);
  const at::Tensor vector = at::full({2}, 1.0F).set_requires_grad(true);
  AdamW adamw({matrix, vector}, {.weight_decay = 0.5, .decay = Decay::kMatrices});
  matrix.mutable_grad() = at::zeros({2, 2});
  vector.mutable_grad() = at::zeros({2});
  adamw.step(0.1);
  EXPECT_TRUE(at::equal(matrix.detach(), at::full({2, 2}, 1.0F - 0.1F * 0.5F)));
  EXPECT_TRUE(at::equal(vector.detach(), at::full({2}, 1.0F)));
}

struct SgdCase {
  double momentum;
  bool nesterov;
  double weight_decay;
};

class SgdTest : public ::testing::TestWithParam<SgdCase> {};

TEST_P(SgdTest, AgreesWithTorchOptimWithinRounding) {
  const SgdCase& c = GetParam();
  std::vector<at::Tensor> ours = random_parameters();
  std::vector<at::Tensor> theirs = copy_of(ours);
  Sgd sgd(ours, {.momentum = c.momentum, .nesterov = c.nesterov, .weight_decay = c.weight_decay});
  torch::optim::SGD reference(
      theirs, torch::optim::SGDOptions(1e-2).momentum(c.momentum).nesterov(c.nesterov).weight_decay(c.weight_decay));
  for (int step = 0; step < 10; ++step) {
    set_random_gradients(ours, theirs);
    sgd.step(1e-2);
    reference.step();
  }
  EXPECT_LT(largest_difference(ours, theirs), 1e-6);
  EXPECT_GT(largest_difference(ours, random_parameters()), 1e-2);
  EXPECT_EQ(sgd.state_bytes() > Bytes(0), c.momentum > 0);
}

INSTANTIATE_TEST_SUITE_P(All, SgdTest,
                         ::testing::Values(SgdCase{0, false, 0}, SgdCase{0.9, false, 0}, SgdCase{0.9, true, 0.1},
                                           SgdCase{0, false, 0.1}));

TEST(Sgd, MatricesAloneDecayOnRequest) {
  at::Tensor matrix = at::full({2, 2}, 1.0).set_requires_grad(true);
  at::Tensor vector = at::full({2}, 1.0).set_requires_grad(true);
  Sgd sgd({matrix, vector}, {.weight_decay = 0.5, .decay = Decay::kMatrices});
  for (at::Tensor* p : {&matrix, &vector}) p->mutable_grad() = at::zeros_like(*p);
  sgd.step(0.1);
  EXPECT_FLOAT_EQ(matrix[0][0].item<float>(), 0.95F);
  EXPECT_EQ(vector[0].item<float>(), 1.0F);
}

TEST(Optimizer, ItsStateCanBeWrittenTo) {
  std::vector<at::Tensor> parameters = random_parameters();
  std::vector<at::Tensor> copies = copy_of(parameters);
  for (const OptimType type : {OptimType::kAdamW, OptimType::kSgd}) {
    OptimSection section;
    section.type = type;
    section.momentum = type == OptimType::kSgd ? 0.9 : 0;
    const auto first = make_optimizer(section, parameters);
    set_random_gradients(parameters, copies);
    first->step(1e-2);
    const auto second = make_optimizer(section, copies);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      copies[i].copy_(parameters[i]);
      const auto from = first->state_of(i), to = second->state_of(i);
      ASSERT_EQ(from.size(), to.size());
      for (size_t k = 0; k < from.size(); ++k) {
        EXPECT_EQ(from[k].first, to[k].first);
        at::Tensor(to[k].second).copy_(from[k].second);
      }
    }
    set_random_gradients(parameters, copies);
    first->step(1e-2);
    second->step(1e-2);
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(at::equal(parameters[i], copies[i])) << i;
  }
}

TEST(AdamW, LeavesOutFrozenRepeatedAndUntouchedParameters) {
  const at::Tensor used = at::randn({3}).set_requires_grad(true);
  const at::Tensor unused = at::randn({3}).set_requires_grad(true);
  const at::Tensor before = unused.detach().clone();
  AdamW adamw({used, at::randn({3}), unused, used}, {});
  ASSERT_EQ(adamw.parameters().size(), 2);
  EXPECT_EQ(adamw.state_bytes(), Bytes(2 * (3 + 3 + 1) * 4));
  used.mutable_grad() = at::randn({3});
  adamw.step(0.1);
  EXPECT_TRUE(at::equal(unused.detach(), before));
  EXPECT_EQ(adamw.states()[0].step.item<float>(), 1);
  EXPECT_EQ(adamw.states()[1].step.item<float>(), 0);
  adamw.zero_grad();
  EXPECT_FALSE(used.grad().defined());
}

TEST(Clip, AgreesWithTorchAndRepeatsToTheBit) {
  std::vector<at::Tensor> ours = random_parameters();
  std::vector<at::Tensor> theirs = copy_of(ours);
  set_random_gradients(ours, theirs);
  const double norm = global_norm(ours);
  EXPECT_EQ(norm, global_norm(theirs));
  clip_to(ours, norm, 1.0);
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(theirs, 1.0), norm, 1e-5 * norm);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::allclose(ours[i].grad(), theirs[i].grad()));
  EXPECT_NEAR(global_norm(ours), 1.0, 1e-5);
}

TEST(Clip, DoesNothingBelowTheLimitOrWithoutOne) {
  std::vector<at::Tensor> parameters = random_parameters();
  EXPECT_EQ(global_norm(parameters), 0);
  for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::randn(parameter.sizes());
  const at::Tensor before = parameters[0].grad().clone();
  const double norm = global_norm(parameters);
  clip_to(parameters, norm, norm * 2);
  clip_to(parameters, norm, 0);
  EXPECT_TRUE(at::equal(parameters[0].grad(), before));
}

TEST(Clip, ANonFiniteGradientShowsInTheNorm) {
  std::vector<at::Tensor> parameters = random_parameters();
  for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::randn(parameter.sizes());
  parameters[1].mutable_grad()[3] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(global_norm(parameters)));
}

}  // namespace
}  // namespace neap::train
