// Routing and routed experts against their definitions, written out token by token, in float64.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "neap/base/error.h"
#include "neap/models/mixture_of_experts.h"
#include "neap/models/test_support.h"
#include "testing/deepseek_config.h"
#include "testing/error_of.h"

namespace neap::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Inputs of routed_experts: 7 tokens with 2 of 5 experts each, of which number 3 has no token.
struct Problem {
  at::Tensor x, weights, gate_up, down;
  at::Tensor experts = at::tensor({4, 0, 0, 1, 2, 4, 1, 0, 4, 2, 0, 2, 1, 4}, at::kLong).view({7, 2});
  Dispatch routes = dispatch(experts, 5);

  explicit Problem(at::TensorOptions options = kDouble) {
    x = leaf(at::randn({7, 6}, options));
    weights = leaf(at::rand({7, 2}, options));
    gate_up = leaf(at::randn({5, 8, 6}, options));
    down = leaf(at::randn({5, 6, 4}, options));
  }
  static at::Tensor leaf(const at::Tensor& values) { return values.detach().clone().requires_grad_(); }
  std::vector<at::Tensor> leaves() const { return {x, weights, gate_up, down}; }
  at::Tensor ours() const { return routed_experts(x, weights, gate_up, down, routes); }

  at::Tensor one_by_one() const {
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < x.size(0); ++t) {
      at::Tensor sum = at::zeros({6}, x.options());
      for (int64_t p = 0; p < 2; ++p) {
        const auto expert = experts[t][p].item<int64_t>();
        const at::Tensor pre = at::mv(gate_up[expert], x[t]);
        const at::Tensor inner = at::silu(pre.narrow(0, 0, 4)) * pre.narrow(0, 4, 4);
        sum = sum + weights[t][p] * at::mv(down[expert], inner);
      }
      rows.push_back(sum);
    }
    return at::stack(rows);
  }
};

std::vector<at::Tensor> gradients(const at::Tensor& out, const std::vector<at::Tensor>& leaves,
                                  const at::Tensor& grad) {
  out.backward(grad);
  std::vector<at::Tensor> found;
  for (at::Tensor leaf : leaves) {
    found.push_back(leaf.grad());
    leaf.mutable_grad() = at::Tensor();
  }
  return found;
}

TEST(Dispatch, SortsPairsByExpertAndThenByToken) {
  const Dispatch routes = dispatch(at::tensor({2, 0, 0, 2, 2, 3}, at::kLong).view({3, 2}), 5);
  EXPECT_THAT(routes.counts, ElementsAre(2, 0, 3, 1, 0));
  EXPECT_TRUE(at::equal(routes.pairs, at::tensor({1, 2, 0, 3, 4, 5}, at::kLong)));
  EXPECT_TRUE(at::equal(routes.tokens, at::tensor({0, 1, 0, 1, 2, 2}, at::kLong)));
}

TEST(RoutedExperts, EqualTheirDefinitionWithEveryGradient) {
  const Problem problem;
  const at::Tensor ours = problem.ours(), expected = problem.one_by_one();
  EXPECT_TRUE(at::allclose(ours, expected, 1e-10, 1e-12));
  const at::Tensor grad = at::randn(ours.sizes(), kDouble);
  const auto found = gradients(ours, problem.leaves(), grad), right = gradients(expected, problem.leaves(), grad);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], right[i], 1e-10, 1e-12)) << i;
  EXPECT_EQ(found[2][3].abs().max().item<double>(), 0) << "an expert without tokens";
}

TEST(RoutedExperts, LowPrecisionHasTheGradientsOfItsDtypes) {
  const Problem wide(at::kFloat);
  Problem low = wide;
  low.x = Problem::leaf(wide.x.to(at::kBFloat16)), low.gate_up = Problem::leaf(wide.gate_up.to(at::kBFloat16));
  low.down = Problem::leaf(wide.down.to(at::kBFloat16));
  low.weights = Problem::leaf(wide.weights);  // the router's are float32
  const at::Tensor out = low.ours();
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(out.to(at::kFloat), wide.ours(), 0.1, 0.1));
  const auto found = gradients(out, low.leaves(), at::ones_like(out));
  EXPECT_EQ(found[0].scalar_type(), at::kBFloat16);
  EXPECT_EQ(found[1].scalar_type(), at::kFloat);
}

TEST(RoutedExperts, FrozenMatricesGetNoGradient) {
  Problem problem;
  problem.gate_up.set_requires_grad(false), problem.down.set_requires_grad(false);
  const at::Tensor out = problem.ours();
  const auto found = gradients(out, problem.leaves(), at::ones_like(out));
  EXPECT_TRUE(found[0].defined() && found[1].defined());
  EXPECT_FALSE(found[2].defined() || found[3].defined());
}

TEST(RoutedExperts, HaveTheSameBitsOnAnyNumberOfThreads) {
  const at::Tensor experts = at::stack({at::arange(512) % 3, at::arange(512) % 5 + 3}, 1);
  const Dispatch routes = dispatch(experts, 8);
  const at::Tensor x = at::randn({512, 64}), weights = at::rand({512, 2});
  const at::Tensor gate_up = at::randn({8, 64, 64}), down = at::randn({8, 64, 32});
  const auto run = [&] {
    const at::Tensor leaf = Problem::leaf(x);
    const at::Tensor out = routed_experts(leaf, weights, gate_up, down, routes);
    out.backward(x);
    return std::pair(out.detach(), leaf.grad());
  };
  const int threads = at::get_num_threads();
  const auto first = run();
  for (const int n : {1, 2, 4}) {
    at::set_num_threads(n);
    for (int i = 0; i < 5; ++i) {
      const auto again = run();
      EXPECT_TRUE(at::equal(first.first, again.first)) << n;
      EXPECT_TRUE(at::equal(first.second, again.second)) << n;
    }
  }
  at::set_num_threads(threads);
}

TEST(RoutedExperts, BadShapesAreUserErrors) {
  const Problem problem;
  EXPECT_THAT(testing::error_of(
                  [&] { routed_experts(problem.x, problem.weights, problem.down, problem.gate_up, problem.routes); }),
              HasSubstr("expected gate_up [experts, 2 * size, hidden]"));
  EXPECT_THROW(
      routed_experts(problem.x, problem.weights.narrow(0, 0, 3), problem.gate_up, problem.down, problem.routes),
      UserError);
}

// ---- routing

std::vector<double> row_of(const at::Tensor& t, int64_t row) {
  const at::Tensor values = t[row].to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

// Section 2.1.2 of the paper, token by token.
struct Expected {
  std::set<int64_t> experts;
  std::vector<double> weight;  // of each expert; 0 of those not chosen
};
Expected route(const std::vector<double>& score, const std::vector<double>& bias, const ExpertsConfig& config) {
  const auto in_group = static_cast<std::size_t>(config.count / config.groups);
  std::vector<double> biased(score.size());
  std::ranges::transform(score, bias, biased.begin(), std::plus<>());
  std::vector<std::pair<double, std::size_t>> groups;
  for (std::size_t g = 0; g < static_cast<std::size_t>(config.groups); ++g) {
    std::vector<double> own(biased.begin() + static_cast<int64_t>(g * in_group),
                            biased.begin() + static_cast<int64_t>((g + 1) * in_group));
    std::ranges::sort(own, std::greater<>());
    groups.emplace_back(own[0] + own[1], g);
  }
  std::ranges::sort(groups, std::greater<>());
  groups.resize(static_cast<std::size_t>(config.groups_per_token));
  std::vector<std::pair<double, int64_t>> open;
  for (const auto& [worth, g] : groups) {
    for (std::size_t e = g * in_group; e < (g + 1) * in_group; ++e) open.emplace_back(biased[e], e);
  }
  std::ranges::sort(open, std::greater<>());
  Expected out{{}, std::vector<double>(score.size())};
  double sum = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(config.per_token); ++i) {
    out.experts.insert(open[i].second);
    sum += score[static_cast<std::size_t>(open[i].second)];
  }
  for (const int64_t e : out.experts) {
    const double own = score[static_cast<std::size_t>(e)];
    out.weight[static_cast<std::size_t>(e)] = own / (config.norm_topk_prob ? sum : 1) * config.routed_scaling_factor;
  }
  return out;
}

TEST(Router, ChoosesByBiasedScoreAmongTheBestGroupsAndWeighsByScore) {
  for (const bool norm : {true, false}) {
    for (const int64_t groups : {1, 2, 4}) {
      ModelConfig config = testing::small_deepseek(61);
      config.experts->norm_topk_prob = norm;
      config.experts->groups = groups, config.experts->groups_per_token = std::max<int64_t>(1, groups / 2);
      config.experts->per_token = 2;
      Router router(config, at::TensorOptions());
      const at::NoGradGuard no_grad;
      router.weight.normal_();
      router.e_score_correction_bias.normal_(0, 0.5);
      const at::Tensor tokens = at::randn({40, 32});
      const Router::Choice choice = router.forward(tokens);
      const at::Tensor scores = at::linear(tokens, router.weight).sigmoid();
      const auto bias = row_of(router.e_score_correction_bias.unsqueeze(0), 0);
      for (int64_t t = 0; t < 40; ++t) {
        const Expected expected = route(row_of(scores, t), bias, *config.experts);
        std::set<int64_t> found;
        for (int64_t p = 0; p < 2; ++p) {
          const auto expert = choice.experts[t][p].item<int64_t>();
          found.insert(expert);
          EXPECT_NEAR(choice.weights[t][p].item<double>(), expected.weight[static_cast<std::size_t>(expert)], 1e-5);
        }
        EXPECT_EQ(found, expected.experts) << t;
      }
    }
  }
}

TEST(MixtureOfExperts, CountsTheTokensOfEachExpertOnce) {
  const ModelConfig config = testing::small_deepseek(61);
  MixtureOfExperts mixture(config, at::TensorOptions());
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : mixture.parameters()) parameter.normal_(0, 0.1);
    mixture.router().e_score_correction_bias[5].fill_(10);  // everybody's first choice
  }
  const at::Tensor x = at::randn({2, 9, 32});
  const auto total = [](const std::vector<int64_t>& load) {
    return std::accumulate(load.begin(), load.end(), int64_t{0});
  };
  mixture.forward(x);
  mixture.forward(x);
  {
    const at::NoGradGuard no_grad;
    mixture.forward(x);
  }
  {
    const autograd::RunningAgain again;
    mixture.forward(x);
  }
  const auto load = mixture.take_load();
  EXPECT_EQ(load.size(), 8);
  EXPECT_EQ(total(load), 2 * 18 * 3) << "two forwards that record a graph";
  EXPECT_EQ(load[5], 2 * 18);
  EXPECT_EQ(total(mixture.take_load()), 0);
}

}  // namespace
}  // namespace neap::models
