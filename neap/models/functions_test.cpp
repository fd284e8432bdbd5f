// Each function against the plain composition of operators that it replaces, in float64, where a wrong formula shows
// at once; and the loss in float32 and bfloat16 besides.
#include "neap/models/functions.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/models/chunked_cross_entropy.h"
#include "neap/models/rotary.h"
#include "neap/models/test_support.h"

namespace neap::models {
namespace {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

Tensors leaves(const Tensors& inputs) {
  Tensors out;
  for (const at::Tensor& input : inputs) out.push_back(input.detach().clone().requires_grad_());
  return out;
}

// Value and gradients of ours and of the reference, under the same random gradient of the output.
void expect_same(const Function& ours, const Function& reference, const Tensors& inputs, double tolerance = 1e-10) {
  const Tensors x = leaves(inputs);
  const Tensors y = leaves(inputs);
  const at::Tensor a = ours(x);
  const at::Tensor b = reference(y);
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  EXPECT_TRUE(at::allclose(a, b, tolerance, tolerance)) << (a - b).abs().max();
  const at::Tensor grad = at::randn(a.sizes(), a.options());
  a.backward(grad);
  b.backward(grad);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(x[i].grad().defined()) << i;
    EXPECT_TRUE(at::allclose(x[i].grad(), y[i].grad(), tolerance, tolerance))
        << "input " << i << ": " << (x[i].grad() - y[i].grad()).abs().max();
  }
}

TEST(RmsNorm, EqualsItsComposition) {
  expect_same([](const Tensors& in) { return rms_norm(in[0], in[1], 1e-3); },
              [](const Tensors& in) { return in[0] * at::rsqrt(in[0].square().mean({-1}, true) + 1e-3) * in[1]; },
              {at::randn({2, 3, 10}, kDouble), at::randn({10}, kDouble)});
}

TEST(RmsNorm, ComputesLowPrecisionInFloat32) {
  const at::Tensor x = at::randn({64, 96});
  const at::Tensor weight = at::randn({96});
  const at::Tensor low = rms_norm(x.to(at::kBFloat16), weight.to(at::kBFloat16), 1e-6);
  EXPECT_EQ(low.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(low.to(at::kFloat), rms_norm(x, weight, 1e-6), 2e-2, 1e-2));
}

TEST(Swiglu, EqualsItsComposition) {
  expect_same([](const Tensors& in) { return swiglu(in[0], in[1]); },
              [](const Tensors& in) { return at::silu(in[0]) * in[1]; },
              {at::randn({3, 7}, kDouble), at::randn({3, 7}, kDouble)});
}

TEST(SwigluLinear, EqualsItsComposition) {
  expect_same([](const Tensors& in) { return swiglu_linear(in[0], in[1], in[2]); },
              [](const Tensors& in) { return at::linear(at::silu(in[0]) * in[1], in[2]); },
              {at::randn({2, 3, 7}, kDouble), at::randn({2, 3, 7}, kDouble), at::randn({5, 7}, kDouble)});
}

TEST(SwigluLinear, HasTheBitsOfItsParts) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const Tensors values{at::randn({2, 33, 70}).to(type), at::randn({2, 33, 70}).to(type),
                         at::randn({41, 70}).to(type)};
    const Tensors x = leaves(values), y = leaves(values);
    const at::Tensor one = swiglu_linear(x[0], x[1], x[2]), parts = at::linear(swiglu(y[0], y[1]), y[2]);
    EXPECT_TRUE(at::equal(one, parts));
    const at::Tensor grad = at::randn(one.sizes()).to(type);
    one.backward(grad);
    parts.backward(grad);
    for (int i : {0, 1, 2}) EXPECT_TRUE(at::equal(x[i].grad(), y[i].grad())) << type << ", input " << i;
  }
}

TEST(SwigluLinear, MakesNoGradientOfAFrozenWeight) {
  const Tensors in = leaves({at::randn({3, 7}), at::randn({3, 7}), at::randn({5, 7})});
  const at::Tensor frozen = in[2].detach();
  swiglu_linear(in[0], in[1], frozen).sum().backward();
  EXPECT_TRUE(in[0].grad().defined() && in[1].grad().defined() && !frozen.grad().defined());
}

TEST(SwigluLinear, FollowsAutocast) {
  const bool before = at::autocast::is_autocast_enabled(at::kCPU);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const ScopeExit end([&] { at::autocast::set_autocast_enabled(at::kCPU, before); });
  const Tensors in = leaves({at::randn({3, 7}), at::randn({7, 7}), at::randn({5, 7})});
  const at::Tensor gate = at::linear(in[0], in[1]);
  ASSERT_EQ(gate.scalar_type(), at::kBFloat16);
  const at::Tensor out = swiglu_linear(gate, gate, in[2]);
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  out.sum().backward();
  for (const at::Tensor& input : in) EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
}

TEST(Swiglu, LeavesAGradientThatOthersSeeAlone) {
  const at::Tensor gate = at::randn({3, 7}, kDouble).requires_grad_();
  const at::Tensor up = at::randn({3, 7}, kDouble).requires_grad_();
  at::Tensor seen, whole;
  const at::Tensor held = swiglu(gate, up);
  held.register_hook([&](const at::Tensor& grad) { seen = grad; });
  (held * 3).sum().backward();
  EXPECT_TRUE(at::equal(seen, at::full({3, 7}, 3.0, kDouble)));

  // A view of a gradient that somebody else holds, and an expanded one.
  const at::Tensor viewed = swiglu(gate, up).view({7, 3});
  viewed.register_hook([&](const at::Tensor& grad) { whole = grad; });
  (viewed * 2).sum().backward();
  EXPECT_TRUE(at::equal(whole, at::full({7, 3}, 2.0, kDouble)));
  swiglu(gate, up).sum().backward();
}

TEST(Swiglu, OverwritesAGradientThatNobodyElseSees) {
  const at::Tensor gate = at::randn({3, 7}, kDouble).requires_grad_();
  const at::Tensor up = at::randn({3, 7}, kDouble).requires_grad_();
  const void* incoming = nullptr;
  const at::Tensor out = swiglu(gate, up);
  out.register_hook([&](const at::Tensor& grad) { incoming = grad.data_ptr(); });
  const void* of_gate = nullptr;
  gate.register_hook([&](const at::Tensor& grad) { of_gate = grad.data_ptr(); });
  (out * 3).sum().backward();
  EXPECT_NE(incoming, nullptr);
  EXPECT_EQ(of_gate, incoming) << "the incoming gradient, which nobody else holds, is overwritten";
}

TEST(Rotary, EqualsTheRotationOfHalves) {
  const RotaryTables tables = rotary_tables(at::randn({3}, kDouble), 5, at::kDouble);
  expect_same([&](const Tensors& in) { return apply_rotary(in[0], tables); },
              [&](const Tensors& in) {
                const auto halves = in[0].chunk(2, -1);
                const at::Tensor cos = at::cat({tables.cos, tables.cos}, -1).unsqueeze(1);
                const at::Tensor sin = at::cat({tables.sin, tables.sin}, -1).unsqueeze(1);
                return in[0] * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
              },
              {at::randn({2, 5, 4, 6}, kDouble)});
}

TEST(Rotary, RotatesNeighboursAndHandsOnWhatIsBefore) {
  const RotaryTables tables = rotary_tables(at::randn({3}, kDouble), 5, at::kDouble);
  expect_same([&](const Tensors& in) { return apply_rotary(in[0], tables, RotaryPairs::kNeighbours); },
              [&](const Tensors& in) {
                const at::Tensor pairs = in[0].narrow(-1, 4, 6).view({2, 5, 4, 3, 2});
                const at::Tensor a = pairs.select(-1, 0), b = pairs.select(-1, 1);
                const at::Tensor cos = tables.cos.unsqueeze(1), sin = tables.sin.unsqueeze(1);
                return at::cat({in[0].narrow(-1, 0, 4), a * cos - b * sin, b * cos + a * sin}, -1);
              },
              {at::randn({2, 5, 4, 10}, kDouble)});
}

TEST(Rotary, MultipliesTheTables) {
  const at::Tensor frequencies = at::randn({3}, kDouble);
  const RotaryTables plain = rotary_tables(frequencies, 4, at::kDouble);
  const RotaryTables scaled = rotary_tables(frequencies, 4, at::kDouble, 1.5);
  EXPECT_TRUE(at::allclose(scaled.cos, plain.cos * 1.5));
  EXPECT_TRUE(at::allclose(scaled.sin, plain.sin * 1.5));
}

TEST(Rotary, StretchesSlowFrequenciesAsYarnDoes) {
  ModelConfig config;
  config.head_dim = 64;
  config.rope_scaling.type = RopeScaling::Type::kYarn;
  config.rope_scaling.factor = 40;
  config.rope_scaling.original_max_position_embeddings = 4096;
  const at::Tensor scaled = rotary_frequencies(config);
  config.rope_scaling.type = RopeScaling::Type::kDefault;
  const at::Tensor ratio = scaled / rotary_frequencies(config);
  // Of the published DeepSeek-V3: the blend goes from dimension 10 to 23.
  EXPECT_TRUE(at::allclose(ratio.slice(0, 0, 11), at::ones({11})));
  EXPECT_TRUE(at::allclose(ratio.slice(0, 23), at::full({9}, 1.0 / 40)));
  EXPECT_TRUE((ratio.slice(0, 10, 23) > ratio.slice(0, 11, 24)).all().item<bool>());
}

TEST(Rotary, TakesAnyStrides) {
  const RotaryTables tables = rotary_tables(at::randn({4}), 6, at::kFloat);
  const at::Tensor x = at::randn({2, 3, 6, 8}).transpose(1, 2);
  EXPECT_TRUE(at::equal(apply_rotary(x, tables), apply_rotary(x.contiguous(), tables)));
}

TEST(Rotary, ScalesFrequenciesAsLlama3Does) {
  ModelConfig config;
  config.head_dim = 64;
  config.rope_theta = 500000;
  config.rope_scaling.type = RopeScaling::Type::kLlama3;
  config.rope_scaling.factor = 8;
  config.rope_scaling.original_max_position_embeddings = 8192;
  const at::Tensor scaled = rotary_frequencies(config);
  config.rope_scaling = {};
  const at::Tensor plain = rotary_frequencies(config);
  for (int64_t i = 0; i < 32; ++i) {
    const double frequency = std::pow(500000.0, -2.0 * static_cast<double>(i) / 64);
    EXPECT_NEAR(plain[i].item<double>(), frequency, 1e-6 * frequency);
    const double wavelength = 2 * M_PI / frequency;
    const double keep = std::clamp((8192 / wavelength - 1) / 3, 0.0, 1.0);
    EXPECT_NEAR(scaled[i].item<double>(), frequency * (keep + (1 - keep) / 8), 1e-5 * frequency) << i;
  }
}

TEST(TiedEmbedding, SumsTheGradientsOfBothUses) {
  const at::Tensor ids = at::randint(0, 11, {3, 4}, at::kLong);
  const Function ours = [&](const Tensors& in) {
    const auto [rows, head] = tied_embedding(in[0], ids);
    return at::linear(rows, head);
  };
  expect_same(ours, [&](const Tensors& in) { return at::linear(at::embedding(in[0], ids), in[0]); },
              {at::randn({11, 5}, kDouble)});
}

TEST(TiedEmbedding, WorksWithEitherUseAlone) {
  const at::Tensor ids = at::randint(0, 11, {3, 4}, at::kLong);
  expect_same([&](const Tensors& in) { return tied_embedding(in[0], ids).first; },
              [&](const Tensors& in) { return at::embedding(in[0], ids); }, {at::randn({11, 5}, kDouble)});
  expect_same([&](const Tensors& in) { return tied_embedding(in[0], ids).second * 2; },
              [&](const Tensors& in) { return in[0] * 2; }, {at::randn({11, 5}, kDouble)});
}

TEST(TiedEmbedding, LeavesAGradientThatOthersHoldAlone) {
  const at::Tensor ids = at::randint(0, 11, {6}, at::kLong);
  at::Tensor weight = at::randn({11, 5}, kDouble).requires_grad_();
  const auto [rows, head] = tied_embedding(weight, ids);
  at::Tensor seen;
  head.register_hook([&](const at::Tensor& grad) { seen = grad; });
  (rows.sum() + head.sum()).backward();
  EXPECT_TRUE(at::equal(seen, at::ones({11, 5}, kDouble)));
}

TEST(TiedEmbedding, LeavesAGradientThatIsAViewOfAnothersMemoryAlone) {
  const at::Tensor ids = at::randint(0, 11, {6}, at::kLong);
  const at::Tensor weight = at::randn({11, 5}, kDouble).requires_grad_();
  const auto [rows, head] = tied_embedding(weight, ids);
  const at::Tensor theirs = at::ones({22, 5}, kDouble);
  head.register_hook([&](const at::Tensor&) { return theirs.narrow(0, 11, 11); });
  (rows.sum() + head.sum()).backward();
  EXPECT_TRUE(at::equal(theirs, at::ones({22, 5}, kDouble)));
  EXPECT_EQ(weight.grad().sum().item<double>(), 55 + 30);
}

TEST(TiedEmbedding, TakesAnExpandedGradient) {
  const at::Tensor ids = at::randint(0, 11, {6}, at::kLong);
  expect_same(
      [&](const Tensors& in) {
        const auto [rows, head] = tied_embedding(in[0], ids);
        return rows.sum() + head.sum();  // the gradient of a sum is one number in every place
      },
      [&](const Tensors& in) { return at::embedding(in[0], ids).sum() + in[0].sum(); }, {at::randn({11, 5}, kDouble)});
}

// The loss
// -------------------------------------------------------------------------------------------------------------

struct Case {
  int64_t tokens = 13;
  int64_t vocabulary = 17;
  at::Tensor labels = at::randint(0, vocabulary, {tokens}, at::kLong);
  Tensors inputs(at::ScalarType type = at::kDouble) const {
    return {at::randn({tokens, 6}, kDouble).to(type), at::randn({vocabulary, 6}, kDouble).to(type)};
  }
};

TEST(ChunkedCrossEntropy, EqualsCrossEntropyForEveryChunkSize) {
  Case c;
  c.labels.narrow(0, 2, 3).fill_(-100);
  for (const int64_t chunk : {0, 1, 4, 13, 100}) {
    expect_same(
        [&](const Tensors& in) { return chunked_cross_entropy(in[0], in[1], c.labels, {.chunk_tokens = chunk}); },
        [&](const Tensors& in) { return at::cross_entropy_loss(at::linear(in[0], in[1]), c.labels); }, c.inputs());
  }
}

TEST(ChunkedCrossEntropy, WeighsByTheGivenDivisorAndIgnoresTheGivenIndex) {
  Case c;
  expect_same(
      [&](const Tensors& in) {
        return chunked_cross_entropy(in[0], in[1], c.labels, {.ignore_index = 5, .divisor = 100, .chunk_tokens = 4});
      },
      [&](const Tensors& in) {
        return at::cross_entropy_loss(at::linear(in[0], in[1]), c.labels, {}, at::Reduction::Sum, 5) / 100;
      },
      c.inputs());
}

TEST(ChunkedCrossEntropy, AddsTheSquareOfTheLogNormaliser) {
  Case c;
  expect_same(
      [&](const Tensors& in) {
        return chunked_cross_entropy(in[0], in[1], c.labels, {.z_loss = 0.3, .chunk_tokens = 4});
      },
      [&](const Tensors& in) {
        const at::Tensor logits = at::linear(in[0], in[1]);
        return at::cross_entropy_loss(logits, c.labels) + 0.3 * at::logsumexp(logits, {1}).square().mean();
      },
      c.inputs());
}

TEST(ChunkedCrossEntropy, SumsLowPrecisionInFloat32) {
  Case c;
  const Tensors in = leaves(c.inputs(at::kBFloat16));
  const Tensors wide = leaves({in[0].to(at::kFloat), in[1].to(at::kFloat)});
  const at::Tensor loss = chunked_cross_entropy(in[0], in[1], c.labels, {.chunk_tokens = 3});
  const at::Tensor expected = at::cross_entropy_loss(at::linear(wide[0], wide[1]), c.labels);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 2e-2);
  loss.backward();
  expected.backward();
  for (int i : {0, 1}) {
    EXPECT_EQ(in[i].grad().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(in[i].grad().to(at::kFloat), wide[i].grad(), 5e-2, 5e-3));
  }
}

// 1 / 120 is 0.34 % more in bfloat16, which no rounding of single elements would take back.
TEST(ChunkedCrossEntropy, DividesLowPrecisionWithoutABias) {
  const Case c{.tokens = 120, .vocabulary = 40};
  const Tensors in = leaves(c.inputs(at::kBFloat16));
  const Tensors wide = leaves({in[0].to(at::kFloat), in[1].to(at::kFloat)});
  chunked_cross_entropy(in[0], in[1], c.labels, {}).backward();
  at::cross_entropy_loss(at::linear(wide[0], wide[1]), c.labels).backward();
  for (int i : {0, 1}) {
    const at::Tensor found = in[i].grad().to(at::kDouble), expected = wide[i].grad().to(at::kDouble);
    EXPECT_NEAR((found * expected).sum().item<double>() / expected.square().sum().item<double>(), 1, 2e-3);
  }
}

// 0.3 is 0.26 % more in bfloat16.
TEST(ChunkedCrossEntropy, AWeightOfTheLossIsNotRounded) {
  const Case c{.tokens = 128, .vocabulary = 40};
  const Tensors in = leaves(c.inputs(at::kBFloat16));
  const Tensors weighted = leaves({in[0].detach().clone(), in[1].detach().clone()});
  chunked_cross_entropy(in[0], in[1], c.labels, {}).backward();
  (chunked_cross_entropy(weighted[0], weighted[1], c.labels, {}) * 0.3).backward();
  for (int i : {0, 1}) {
    EXPECT_EQ(weighted[i].grad().scalar_type(), at::kBFloat16);
    const at::Tensor found = weighted[i].grad().to(at::kDouble), expected = in[i].grad().to(at::kDouble) * 0.3;
    EXPECT_NEAR((found * expected).sum().item<double>() / expected.square().sum().item<double>(), 1, 1e-3);
  }
}

TEST(ChunkedCrossEntropy, GivesTheSameGradientsAgainOnARetainedGraph) {
  Case c;
  const Tensors in = leaves(c.inputs(at::kFloat));
  const at::Tensor loss = chunked_cross_entropy(in[0], in[1], c.labels, {}) * 3;
  const auto first = torch::autograd::grad({loss}, in, {}, /*retain_graph=*/true);
  const auto second = torch::autograd::grad({loss}, in);
  EXPECT_TRUE(at::equal(first[0], second[0]));
  EXPECT_TRUE(at::equal(first[1], second[1]));
}

TEST(ChunkedCrossEntropy, WorksWithoutAGradientOrWithOneOnly) {
  Case c;
  Tensors in = c.inputs();
  const double expected = at::cross_entropy_loss(at::linear(in[0], in[1]), c.labels).item<double>();
  EXPECT_NEAR(chunked_cross_entropy(in[0], in[1], c.labels).item<double>(), expected, 1e-10);
  in[0].requires_grad_();
  chunked_cross_entropy(in[0], in[1], c.labels).backward();
  EXPECT_TRUE(in[0].grad().defined());
  EXPECT_FALSE(in[1].grad().defined());
}

TEST(ChunkedCrossEntropy, IsZeroWithoutAnyLabel) {
  Case c;
  c.labels.fill_(-100);
  for (const std::optional<double> divisor : {std::optional<double>(), std::optional<double>(4)}) {
    const Tensors in = leaves(c.inputs());
    const at::Tensor loss = chunked_cross_entropy(in[0], in[1], c.labels, {.divisor = divisor});
    EXPECT_EQ(loss.item<double>(), 0.0);
    loss.backward();
    EXPECT_EQ(in[0].grad().abs().max().item<double>(), 0.0);
    EXPECT_EQ(in[1].grad().abs().max().item<double>(), 0.0);
  }
}

// A race shows itself only now and then: with the accumulating index_put_ most of these rounds differ.
TEST(TiedEmbedding, AddsTheRowsOfEqualIdsInOneOrderOnAnyNumberOfThreads) {
  const int threads_before = at::get_num_threads();
  const at::Tensor weight = at::randn({8, 576}).requires_grad_();
  const at::Tensor ids = at::randint(8, {2048}, at::kLong);
  const at::Tensor upstream = at::randn({2048, 576});
  const auto gradient = [&](int threads) {
    at::set_num_threads(threads);
    const auto [rows, head] = tied_embedding(weight, ids);
    return torch::autograd::grad({rows, head}, {weight}, {upstream, at::ones_like(weight)})[0];
  };
  const at::Tensor expected = gradient(1);
  for (int round = 0; round < 20; ++round) EXPECT_TRUE(at::equal(gradient(2), expected)) << "round " << round;
  at::set_num_threads(threads_before);
}

TEST(HandWrittenFunctions, RefuseAGraphOfTheirGradient) {
  Case c;
  const Tensors in = leaves(c.inputs());
  const at::Tensor loss = chunked_cross_entropy(in[0], in[1], c.labels);
  EXPECT_THROW(torch::autograd::grad({loss}, in, {}, true, /*create_graph=*/true), UserError);
  const at::Tensor normed = rms_norm(in[0], at::ones({6}, kDouble), 1e-6).sum();
  EXPECT_THROW(torch::autograd::grad({normed}, {in[0]}, {}, true, /*create_graph=*/true), UserError);
}

TEST(ChunkedCrossEntropy, BadShapesAreUserErrors) {
  Case c;
  const Tensors in = c.inputs();
  EXPECT_THROW(chunked_cross_entropy(in[0], in[1].t(), c.labels), UserError);
  EXPECT_THROW(chunked_cross_entropy(in[0], in[1], c.labels.slice(0, 1)), UserError);
}

}  // namespace
}  // namespace neap::models
