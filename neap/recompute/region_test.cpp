// A region is the same computation: every kind of pass over it gives the gradients, and leaves the generators and the
// memory, of the pass without it.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "neap/autograd/hook_point.h"
#include "neap/base/scope_exit.h"
#include "neap/recompute/test_support.h"

namespace neap::recompute::testing {
namespace {

namespace ag = torch::autograd;

class RegionTest : public ::testing::Test {
 protected:
  RegionTest() {
    plain = net.gradients_of(net.loss(Way::kPlain));
    next_plain = at::rand({4});
    for (Block& block : net.blocks) block.calls = block.completed = 0;
  }

  Net net;
  TensorList plain;
  Tensor next_plain;  // what the generator gives after the plain run
};

class RegionWays : public RegionTest, public ::testing::WithParamInterface<Way> {};

INSTANTIATE_TEST_SUITE_P(Ways, RegionWays, ::testing::Values(Way::kRegions, Way::kNested),
                         [](const auto& info) { return std::string(info.param == Way::kNested ? "Nested" : "Flat"); });

TEST_P(RegionWays, GivesTheSameGradientsAndLeavesTheGeneratorAlike) {
  const Tensor loss = net.loss(GetParam());
  EXPECT_EQ(net.calls(), 3);
  EXPECT_TRUE(bit_equal(net.gradients_of(loss), plain));
  EXPECT_TRUE(bit_equal(at::rand({4}), next_plain));
  EXPECT_EQ(net.calls(), 6);  // once more each
}

TEST_P(RegionWays, ARetainedGraphRunsAgainInEveryPass) {
  const Tensor loss = net.loss(GetParam());
  for (int pass = 1; pass <= 3; ++pass) {
    loss.backward({}, /*retain_graph=*/pass < 3);
    EXPECT_TRUE(bit_equal(net.gradients(), plain)) << pass;
    EXPECT_EQ(net.calls(), 3 + 3 * pass);
  }
}

TEST_P(RegionWays, GradOfChosenInputsLeavesTheOthersAlone) {
  const auto chosen = ag::grad({net.loss(GetParam())}, {net.x, net.blocks[1].parameters[4]});
  EXPECT_TRUE(bit_equal(chosen, {plain[0], plain[1 + 6 + 4]}));
  EXPECT_FALSE(net.blocks[0].parameters[2].grad().defined());
}

TEST_P(RegionWays, GradientsCanBeDifferentiated) {
  const auto second_order = [&](Way way) {
    const auto first =
        ag::grad({net.loss(way)}, {net.x, net.blocks[0].parameters[2]}, {}, std::nullopt, /*create_graph=*/true);
    (first[0].pow(2).sum() + first[1].pow(2).sum()).backward();
    return net.gradients();
  };
  EXPECT_TRUE(bit_equal(second_order(GetParam()), second_order(Way::kPlain)));
}

TEST_P(RegionWays, BackwardRunsOnAnyThread) {
  const Tensor loss = net.loss(GetParam());
  std::thread([&] { loss.backward(); }).join();
  EXPECT_TRUE(bit_equal(net.gradients(), plain));
}

TEST_P(RegionWays, ThreadsRunBackwardOverOneGraphAtOnce) {
  const Tensor loss = net.loss(GetParam());
  const TensorList leaves = net.leaves();
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int pass = 0; pass < 4; ++pass) {
        right += bool(bit_equal(ag::grad({loss}, leaves, {}, /*retain_graph=*/true), plain));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 12);
}

TEST_P(RegionWays, AutocastIsFoundAgain) {
  const auto run = [&](Way way, bool backward_inside) {
    Tensor loss;
    TensorList gradients;
    {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::increment_nesting();
      const ScopeExit leave([] {
        if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
      });
      loss = net.loss(way);
      if (backward_inside) gradients = net.gradients_of(loss);
    }
    return backward_inside ? gradients : net.gradients_of(loss);
  };
  const TensorList in_bf16 = run(Way::kPlain, false);
  EXPECT_FALSE(bit_equal(in_bf16, plain));
  for (const bool inside : {false, true}) EXPECT_TRUE(bit_equal(run(GetParam(), inside), in_bf16)) << inside;
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_P(RegionWays, AutocastThatBeganAfterForwardStaysOutside) {
  const auto backward_under_autocast = [&](Way way) {
    const Tensor loss = net.loss(way);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const ScopeExit leave([] {
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    });
    const TensorList gradients = net.gradients_of(loss);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    return gradients;
  };
  EXPECT_TRUE(bit_equal(backward_under_autocast(GetParam()), backward_under_autocast(Way::kPlain)));
}

TEST_F(RegionTest, AnomalyModeSeesNothingUnusual) {
  ag::AnomalyMode::set_enabled(true);
  const ScopeExit restore([] { ag::AnomalyMode::set_enabled(false); });
  const Tensor x = at::ones({2}).set_requires_grad(true);
  region_of([](const Tensor& in) { return in.sin(); }, x).sum().backward();
  EXPECT_TRUE(bit_equal(x.grad(), x.cos()));
}

// Saves what it is given as it is, and counts.
class CountingPolicy final : public autograd::SavedTensorPolicy {
 public:
  std::unique_ptr<autograd::SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(*this); }
  int packed = 0, unpacked = 0, alive = 0;

 private:
  struct Hook final : autograd::SavedVariableHooks {
    explicit Hook(CountingPolicy& p) : policy(p) { ++policy.alive; }
    ~Hook() override { --policy.alive; }
    void call_pack_hook(const Tensor& tensor) override {
      ++policy.packed;
      kept = tensor.detach();
    }
    Tensor call_unpack_hook() override {
      ++policy.unpacked;
      return kept;
    }
    CountingPolicy& policy;
    Tensor kept;
  };
};

TEST_P(RegionWays, TheSurroundingScopeSeesTheInputsAlone) {
  CountingPolicy outer;
  {
    const autograd::SavedTensorScope scope(&outer);
    const Tensor loss = net.loss(GetParam());
    EXPECT_EQ(outer.packed, 3 + 1);  // and what the loss saves
    loss.backward();                 // nor does the second run reach a scope that is open then
  }
  EXPECT_TRUE(bit_equal(net.gradients(), plain));
  EXPECT_EQ(outer.packed, 3 + 1);
  EXPECT_EQ(outer.unpacked, 3 + 1);
  EXPECT_EQ(outer.alive, 0);
}

TEST_F(RegionTest, StopsWhenTheLastTensorIsThere) {
  net.gradients_of(net.loss(Way::kRegions));
  EXPECT_EQ(net.completed(), 3);  // the first runs alone
  net.gradients_of(net.loss(Way::kRegions, {{.early_stop = false}}));
  EXPECT_EQ(net.completed(), 3 + 6);
}

TEST_F(RegionTest, WithoutRandomNumbersKeptDropoutDiffers) {
  const TensorList gradients = net.gradients_of(net.loss(Way::kRegions, {{.preserve_rng = false}}));
  EXPECT_FALSE(bit_equal(gradients, plain));
  EXPECT_FALSE(bit_equal(at::rand({4}), next_plain));
}

TEST_F(RegionTest, KeepsNothingButItsInputs) {
  Block& block = net.blocks[0];
  for (const bool recomputed : {false, true}) {
    std::vector<Watched> inner;
    const auto body = [&](const Tensor& x) {
      const Tensor y = block.attention(x);
      if (inner.empty()) inner.emplace_back(y);
      return block.mlp(y);
    };
    Tensor out = recomputed ? region_of(body, net.x) : body(net.x);
    EXPECT_EQ(inner[0].alive(), !recomputed);
    out = Tensor();
    EXPECT_FALSE(inner[0].alive());
  }
}

TEST_F(RegionTest, TheSecondRunsTensorsGoAsTheirNodesAreDone) {
  Tensor x = at::ones({4}).set_requires_grad(true);
  std::vector<Watched> second;
  bool again = false;
  Tensor y = region_of(
      [&](const Tensor& in) {
        const Tensor a = in.exp(), b = a.exp(), c = b.exp();
        if (again) second = {Watched(a), Watched(b), Watched(c)};
        return c;
      },
      x, {{.early_stop = false}});
  again = true;
  std::vector<bool> at_the_end;
  x.register_hook([&](const Tensor& gradient) {
    for (const Watched& tensor : second) at_the_end.push_back(tensor.alive());
    return gradient;
  });
  y.sum().backward();
  // exp() saves its result: when the first one's gradient is there, the others have been let go.
  EXPECT_THAT(at_the_end, ::testing::ElementsAre(::testing::_, false, false));
  for (const Watched& tensor : second) EXPECT_FALSE(tensor.alive());
}

TEST_F(RegionTest, ARetainedGraphHoldsNoTensorOfTheSecondRunBetweenPasses) {
  std::vector<Watched> second;
  const Tensor x = at::ones({4}).set_requires_grad(true);
  const Tensor y = region_of(
      [&](const Tensor& in) {
        const Tensor a = in.exp();
        second.emplace_back(a);
        return a.exp();
      },
      x);
  for (int pass = 0; pass < 2; ++pass) {
    y.sum().backward({}, /*retain_graph=*/true);
    for (const Watched& tensor : second) EXPECT_FALSE(tensor.alive()) << pass;
  }
  // What a pass did not ask for goes with the pass.
  const Tensor both = region_of(
      [&](const Tensor& in) {
        const Tensor a = in.exp();
        second.emplace_back(a);
        return a.exp() * in.sin();
      },
      x);
  ag::grad({both.sum()}, {x}, {}, /*retain_graph=*/true);
  for (const Watched& tensor : second) EXPECT_FALSE(tensor.alive());
}

TEST_F(RegionTest, ADroppedGraphFreesTheInputs) {
  Tensor h = at::ones({4}) * 2;
  h = h.set_requires_grad(true) * 1;
  const Watched input(h);
  Tensor y = region_of([](const Tensor& in) { return in.sin(); }, h);
  h = Tensor();
  EXPECT_TRUE(input.alive());
  y = Tensor();
  EXPECT_FALSE(input.alive());
}

struct Throwing : ag::Function<Throwing> {
  static Tensor forward(ag::AutogradContext*, const Tensor& x) { return x.clone(); }
  static ag::variable_list backward(ag::AutogradContext*, const ag::variable_list&) { throw std::out_of_range("node"); }
};

TEST_F(RegionTest, AFailedPassLeavesNothingInAGraphThatIsKept) {
  std::vector<Watched> second;
  const Tensor x = at::ones({4}).set_requires_grad(true);
  const Tensor y = region_of(
      [&](const Tensor& in) {
        const Tensor a = Throwing::apply(in).exp();
        second.emplace_back(a);
        return a.exp();
      },
      x);
  EXPECT_THROW(y.sum().backward({}, /*retain_graph=*/true), std::out_of_range);
  for (const Watched& tensor : second) EXPECT_FALSE(tensor.alive());  // the graph is still there
}

TEST_F(RegionTest, AForwardThatThrowsLeavesNothingBehind) {
  std::vector<Watched> first;
  const Tensor x = at::ones({4}).set_requires_grad(true);
  const auto body = [&](const Tensor& in) -> Tensor {
    first.emplace_back(in.exp());
    throw std::out_of_range("forward");
  };
  EXPECT_THROW(region_of(body, x), std::out_of_range);
  EXPECT_FALSE(first[0].alive());
  EXPECT_EQ(autograd::SavedTensorScope::current(), nullptr);
}

TEST_F(RegionTest, AnExceptionInTheSecondRunReachesBackwardAndTheNextPassWorks) {
  int runs = 0;
  const Tensor x = at::ones({4}).set_requires_grad(true);
  const Tensor y = region_of(
      [&](const Tensor& in) {
        const Tensor a = in.exp();
        if (++runs == 2) throw std::out_of_range("second run");
        return a.sin();
      },
      x);
  EXPECT_THROW(y.sum().backward({}, /*retain_graph=*/true), std::out_of_range);
  EXPECT_EQ(autograd::SavedTensorScope::current(), nullptr);
  EXPECT_FALSE(autograd::running_again());
  y.sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.exp().cos() * x.exp()));
  EXPECT_EQ(runs, 3);
}

TEST_F(RegionTest, WithoutGradModeIsAPlainCall) {
  CountingPolicy outer;
  const autograd::SavedTensorScope scope(&outer);
  const at::NoGradGuard no_grad;
  net.loss(Way::kNested);
  EXPECT_EQ(outer.packed, 0);
  EXPECT_EQ(net.calls(), 3);
}

TEST_F(RegionTest, TakesUndefinedIntegerFrozenAndInferenceInputs) {
  Tensor made_for_inference;
  {
    const c10::InferenceMode inference;
    made_for_inference = at::full({4}, 3.0);
  }
  const Tensor x = at::ones({4}).set_requires_grad(true);
  const Tensor index = at::tensor({2, 0, 1, 3}, at::kLong), frozen = at::full({4}, 2.0);
  const auto body = [](Inputs in) -> TensorList {
    EXPECT_FALSE(in[1].defined());
    EXPECT_FALSE(in[3].requires_grad());
    return {in[0].index_select(0, in[2]).exp() * in[3], at::add(in[4], 1)};
  };
  const auto out = region(body, {x, Tensor(), index, frozen, made_for_inference});
  EXPECT_FALSE(out[1].requires_grad());
  out[0].sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.exp() * 2));
}

TEST_F(RegionTest, GradientsOfParametersAccumulateOnceWhereTwoRegionsShareThem) {
  const Tensor w = at::full({4}, 0.5).set_requires_grad(true);
  const auto twice = [&](bool recomputed) {
    Tensor h = at::ones({4});
    for (int i = 0; i < 2; ++i) {
      const auto body = [w](const Tensor& in) { return (in * w).tanh(); };
      h = recomputed ? region_of(body, h) : body(h);
    }
    h.sum().backward();
    return TensorList{std::exchange(w.mutable_grad(), Tensor())};
  };
  EXPECT_TRUE(bit_equal(twice(true), twice(false)));
}

TEST_F(RegionTest, SeveralOutputsAreUsedApart) {
  const auto run = [&](bool recomputed) {
    const auto body = [](Inputs in) -> TensorList { return {in[0].exp(), in[0].sin() * in[1], in[1].cos()}; };
    const Tensor a = at::ones({3}).set_requires_grad(true), b = at::full({3}, 2.0).set_requires_grad(true);
    auto out = recomputed ? region(body, {a, b}) : body({a, b});
    out[1].sum().backward();  // two passes over two parts of one region
    out[0].sum().backward();
    return TensorList{a.grad(), b.grad()};
  };
  EXPECT_TRUE(bit_equal(run(true), run(false)));
}

struct TwiceUnpacking : ag::Function<TwiceUnpacking> {
  static Tensor forward(ag::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return x.sin();
  }
  static ag::variable_list backward(ag::AutogradContext* context, const ag::variable_list& grads) {
    const Tensor first = context->get_saved_variables()[0], second = context->get_saved_variables()[0];
    return {grads[0] * first.cos() * (first.equal(second) ? 1 : 0)};
  }
};

TEST_F(RegionTest, ATensorMayBeUnpackedTwice) {
  for (const bool retain : {false, true}) {
    const Tensor x = at::full({3}, 0.5).set_requires_grad(true);
    const Tensor y = region_of([](const Tensor& in) { return TwiceUnpacking::apply(in * 2); }, x).sum();
    y.backward({}, retain);
    EXPECT_TRUE(at::allclose(x.grad(), at::cos(x * 2) * 2));
  }
}

TEST_F(RegionTest, ARegionMayDifferentiateItself) {
  // Forces: the gradient of an energy, which is trained on.
  const Tensor w = at::full({4}, 0.7).set_requires_grad(true);
  const auto force = [w](const Tensor& position) {
    const Tensor at = position.detach().set_requires_grad(true);
    const Tensor energy = (at.sin() * w).pow(3).sum();
    return ag::grad({energy}, {at}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0] * position;
  };
  const auto train = [&](const std::function<Tensor(const Tensor&)>& model) {
    const Tensor x = at::linspace(0.1, 1, 4).set_requires_grad(true);
    model(x).pow(2).sum().backward();
    return TensorList{x.grad(), std::exchange(w.mutable_grad(), Tensor())};
  };
  const auto expected = train(force);
  EXPECT_TRUE(bit_equal(train([&](const Tensor& x) { return region_of(force, x); }), expected));
}

TEST_F(RegionTest, LongChainsNeedNoStack) {
  for (const bool dropped : {true, false}) {
    const Tensor x = at::ones({2}).set_requires_grad(true);
    Tensor y = x;
    for (int i = 0; i < 20'000; ++i) {
      y = region_of([](const Tensor& in) { return in * 0.999 + (in * 0).sin(); }, y, {{.preserve_rng = false}});
    }
    if (!dropped) y.sum().backward();
    EXPECT_EQ(x.grad().defined(), !dropped);
  }
}

TEST_F(RegionTest, MetaTensorsPassThrough) {
  const Tensor x = at::empty({2, 3}, at::kMeta).set_requires_grad(true);
  const Tensor y = region_of([](const Tensor& in) { return in.exp().sin(); }, x);
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
}

// Their sizes are no list of numbers.
TEST_F(RegionTest, NestedTensorsPassThrough) {
  const std::vector<Tensor> parts = {at::ones({2}), at::ones({3})};
  const Tensor x = at::_nested_tensor_from_tensor_list(parts).set_requires_grad(true);
  const Tensor y = region_of([](const Tensor& in) { return in * in; }, x);
  y.to_padded_tensor(0).sum().backward();
  EXPECT_TRUE(at::equal(x.grad().to_padded_tensor(0), 2 * x.detach().to_padded_tensor(0)));
}

}  // namespace
}  // namespace neap::recompute::testing
