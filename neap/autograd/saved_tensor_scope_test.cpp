#include "neap/autograd/saved_tensor_scope.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "neap/autograd/test_support.h"
#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "testing/error_of.h"

namespace neap::autograd::testing {
namespace {

namespace ag = torch::autograd;
using ::testing::HasSubstr;

class SavedTensorScopeTest : public ::testing::Test {
 protected:
  SavedTensorScopeTest() {
    net.loss(x).backward();
    expected = net.take_grads(x);
  }
  ~SavedTensorScopeTest() override { EXPECT_EQ(SavedTensorScope::current(), nullptr); }

  Tensor scoped_loss() {
    const SavedTensorScope scope(&policy);
    return net.loss(x);
  }
  RecordingPolicy::Log& log() { return policy.log(); }

  Net net;
  Tensor x = at::randn({2, 8, Net::kWidth}).set_requires_grad(true);
  Tensors expected;
  RecordingPolicy policy;
};

TEST_F(SavedTensorScopeTest, EachSavedTensorGoesThroughOneHookAndGradientsAreBitEqual) {
  const Tensor loss = scoped_loss();
  EXPECT_GT(log().packed, 10);
  EXPECT_EQ(log().live(), log().packed);
  loss.backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
  EXPECT_EQ(log().unpacked, log().packed);
  EXPECT_EQ(log().live(), 0);
}

TEST_F(SavedTensorScopeTest, PackRunsWithoutGradMode) {
  bool grad_mode = false;
  log().on_pack = [&](const Tensor&) { grad_mode |= c10::GradMode::is_enabled(); };
  scoped_loss();
  EXPECT_GT(log().packed, 0);
  EXPECT_FALSE(grad_mode);
}

TEST_F(SavedTensorScopeTest, HooksDieNodeByNodeWhileBackwardGoesOn) {
  std::vector<int> live;
  log().on_unpack = [&] { live.push_back(log().live()); };
  scoped_loss().backward();
  ASSERT_GT(live.size(), 10U);
  EXPECT_TRUE(std::is_sorted(live.rbegin(), live.rend()));
  EXPECT_LE(live.back(), 5);  // what the first operator, the layer norm, saves
}

TEST_F(SavedTensorScopeTest, ADroppedGraphDestroysItsHooks) {
  scoped_loss();
  EXPECT_GT(log().packed, 0);
  EXPECT_EQ(log().live(), 0);
}

TEST_F(SavedTensorScopeTest, ARetainedGraphUnpacksAgainAndKeepsItsHooks) {
  const Tensor loss = scoped_loss();
  const int packed = log().packed;
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(same(net.take_grads(x), expected));
  EXPECT_EQ(log().live(), packed);
  loss.backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
  EXPECT_EQ(log().unpacked, 2 * packed);
  EXPECT_EQ(log().live(), 0);
  EXPECT_THAT(neap::testing::error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("second time"));
}

TEST_F(SavedTensorScopeTest, DoubleBackwardIsBitEqualWithTheScopeAroundForwardOrAroundBoth) {
  at::globalContext().setSDPUseFlash(false);  // the fused CPU attention has no second derivative
  const ScopeExit restore([] { at::globalContext().setSDPUseFlash(true); });
  const auto run = [&](RecordingPolicy* forward, RecordingPolicy* backward) {
    Tensor loss;
    {
      std::optional<SavedTensorScope> scope;
      if (forward != nullptr) scope.emplace(forward);
      loss = net.loss(x);
    }
    Tensors first;
    {
      std::optional<SavedTensorScope> scope;
      if (backward != nullptr) scope.emplace(backward);
      first = ag::grad({loss}, {x, net.params[2]}, {}, std::nullopt, /*create_graph=*/true);
    }
    (first[0].pow(2).sum() + first[1].pow(2).sum()).backward();
    return net.take_grads(x);
  };
  const Tensors plain = run(nullptr, nullptr);
  RecordingPolicy forward, both;
  EXPECT_TRUE(same(run(&forward, nullptr), plain));
  EXPECT_TRUE(same(run(&both, &both), plain));
  EXPECT_GT(both.log().packed, forward.log().packed);  // what the first backward saves is asked for as well
  EXPECT_EQ(forward.log().live(), 0);
  EXPECT_EQ(both.log().live(), 0);
}

TEST_F(SavedTensorScopeTest, GradOfGradOfGradIsBitEqual) {
  const auto third = [&](SavedTensorPolicy* p) {
    std::optional<SavedTensorScope> scope;
    if (p != nullptr) scope.emplace(p);
    Tensor y = x.sin().exp().sum();
    for (int order = 0; order < 3; ++order) y = ag::grad({y}, {x}, {}, std::nullopt, true)[0].sum();
    return y.detach();
  };
  EXPECT_TRUE(at::equal(third(&policy), third(nullptr)));
  EXPECT_EQ(log().live(), 0);
}

TEST_F(SavedTensorScopeTest, AnomalyModeStillNamesTheFunction) {
  ag::AnomalyMode::set_enabled(true);
  const ScopeExit restore([] { ag::AnomalyMode::set_enabled(false); });
  scoped_loss().backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
  const Tensor zero = at::zeros({2}).set_requires_grad(true);
  Tensor y;
  {
    const SavedTensorScope scope(&policy);
    y = (zero * zero).sqrt().mul(zero).sum();  // 0 / 0 in the derivative of the root
  }
  EXPECT_THAT(neap::testing::error_of<c10::Error>([&] { y.backward(); }),
              HasSubstr("'SqrtBackward0' returned nan values"));
}

TEST_F(SavedTensorScopeTest, BackwardOnAnotherThreadUnpacks) {
  const Tensor loss = scoped_loss();
  std::thread([&] { loss.backward(); }).join();
  EXPECT_TRUE(same(net.take_grads(x), expected));
  EXPECT_EQ(log().live(), 0);
}

TEST_F(SavedTensorScopeTest, AScopeCoversItsOwnThreadOnly) {
  const SavedTensorScope scope(&policy);
  RecordingPolicy other;
  std::thread([&] {
    net.loss(x);
    const SavedTensorScope inner(&other);
    net.loss(x);
  }).join();
  EXPECT_EQ(log().made, 0);
  EXPECT_GT(other.log().made, 0);
}

TEST_F(SavedTensorScopeTest, AScopeMayBeOpenedInsideBackward) {
  RecordingPolicy inside;
  log().on_unpack = [&] {
    const at::AutoGradMode grad(true);
    const SavedTensorScope scope(&inside);
    net.loss(x.detach());
  };
  scoped_loss().backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
  EXPECT_GT(inside.log().packed, 0);
  EXPECT_EQ(inside.log().live(), 0);
}

TEST_F(SavedTensorScopeTest, TheInnermostScopeWinsAndTheOuterOneComesBack) {
  RecordingPolicy inner;
  const SavedTensorScope outer_scope(&policy);
  x.sin();
  {
    const SavedTensorScope inner_scope(&inner);
    EXPECT_EQ(SavedTensorScope::current(), &inner_scope);
    x.sin();
    x.sin();
  }
  EXPECT_EQ(SavedTensorScope::current(), &outer_scope);
  x.sin();
  EXPECT_EQ(log().made, 2);
  EXPECT_EQ(inner.log().made, 2);
}

TEST_F(SavedTensorScopeTest, ANullScopeSuspendsTheOuterOnes) {
  const SavedTensorScope outer(&policy);
  {
    const SavedTensorScope off(nullptr);
    x.sin();
    RecordingPolicy again;
    const SavedTensorScope on(&again);
    x.sin();
    EXPECT_EQ(again.log().made, 1);
  }
  EXPECT_EQ(log().made, 0);
}

TEST_F(SavedTensorScopeTest, AnExceptionFromPackReachesTheCallerAndClosesTheScopes) {
  struct Boom : std::runtime_error {
    using runtime_error::runtime_error;
  };
  int left = 5;
  log().on_pack = [&](const Tensor&) {
    if (--left == 0) throw Boom("pack");
  };
  EXPECT_THROW(scoped_loss(), Boom);
  EXPECT_EQ(SavedTensorScope::current(), nullptr);
  EXPECT_EQ(log().live(), 0);
  log().on_pack = nullptr;
  scoped_loss().backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
}

TEST_F(SavedTensorScopeTest, AnExceptionFromUnpackReachesTheCallerOfBackward) {
  struct Boom : std::runtime_error {
    using runtime_error::runtime_error;
  };
  Tensor loss = scoped_loss();
  log().on_unpack = [] { throw Boom("unpack"); };
  EXPECT_THROW(loss.backward(), Boom);
  loss = Tensor();
  EXPECT_EQ(log().live(), 0);
  net.take_grads(x);
  log().on_unpack = nullptr;
  scoped_loss().backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
}

struct FailingPolicy final : SavedTensorPolicy {
  std::unique_ptr<SavedVariableHooks> make_hook() override { throw std::out_of_range("policy"); }
};

TEST_F(SavedTensorScopeTest, AnExceptionFromThePolicyReachesTheCaller) {
  FailingPolicy failing;
  const SavedTensorScope outer(&policy);
  EXPECT_THROW(
      {
        const SavedTensorScope scope(&failing);
        x.sin();
      },
      std::out_of_range);
  EXPECT_EQ(SavedTensorScope::current(), &outer);
}

struct AbstainingPolicy final : SavedTensorPolicy {
  int asked = 0;
  std::unique_ptr<SavedVariableHooks> make_hook() override { return ++asked, nullptr; }
};

TEST_F(SavedTensorScopeTest, APolicyMayLeaveATensorToAutograd) {
  AbstainingPolicy abstaining;
  Tensor loss;
  {
    const SavedTensorScope scope(&abstaining);
    loss = net.loss(x);
  }
  EXPECT_GT(abstaining.asked, 10);
  loss.backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
}

TEST_F(SavedTensorScopeTest, NothingIsSavedUnderNoGradOrInferenceMode) {
  const SavedTensorScope scope(&policy);
  {
    const at::NoGradGuard no_grad;
    net.loss(x);
  }
  {
    const c10::InferenceMode inference;
    net.loss(x);
  }
  EXPECT_EQ(log().made, 0);
}

TEST_F(SavedTensorScopeTest, NobodyIsAskedWhereHooksAreDisabled) {
  at::SavedTensorDefaultHooks::disable("as functorch does");
  Tensor loss;
  {
    const ScopeExit enable([] { at::SavedTensorDefaultHooks::enable(); });
    loss = scoped_loss();
  }
  EXPECT_EQ(log().made, 0);
  loss.backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
}

TEST_F(SavedTensorScopeTest, TracingIsLeftAlone) {
  at::SavedTensorDefaultHooks::set_tracing(true);
  {
    const ScopeExit stop([] { at::SavedTensorDefaultHooks::set_tracing(false); });
    scoped_loss();
  }
  EXPECT_EQ(log().made, 0);
  scoped_loss();
  EXPECT_GT(log().made, 0);
}

TEST_F(SavedTensorScopeTest, PythonHooksWinInsideAScopeAndLoseAroundIt) {
  // Python's stack without Python: the proxy looks at its height and leaves the rest to the engine behind it.
  at::SavedTensorDefaultHooks::lazy_initialize();
  const auto push = [] { at::SavedTensorDefaultHooks::push_hooks({nullptr, nullptr}, {nullptr, nullptr}); };
  const auto pop = [] { at::SavedTensorDefaultHooks::pop_hooks(); };
  {
    const SavedTensorScope scope(&policy);
    push();
    x.sin();
    EXPECT_EQ(log().made, 0);
    {
      const SavedTensorScope inner(&policy);
      x.sin();
      EXPECT_EQ(log().made, 1);
    }
    x.sin();
    EXPECT_EQ(log().made, 1);
    pop();
    x.sin();
    EXPECT_EQ(log().made, 2);
  }
  push();
  {
    const SavedTensorScope scope(&policy);
    x.sin();
    EXPECT_EQ(log().made, 3);
  }
  pop();
}

TEST_F(SavedTensorScopeTest, IntegerTensorsAreSavedLikeOthers) {
  std::vector<at::ScalarType> types;
  log().on_pack = [&](const Tensor& t) { types.push_back(t.scalar_type()); };
  const Tensor leaf = at::randn({3, 4}).set_requires_grad(true);
  const Tensor index = at::ones({3, 1}, at::kLong);
  Tensor y;
  {
    const SavedTensorScope scope(&policy);
    y = at::gather(leaf, 1, index).sum();
  }
  EXPECT_THAT(types, ::testing::Contains(at::kLong));
  y.backward();
  EXPECT_EQ(leaf.grad().select(1, 1).sum().item<float>(), 3);
  EXPECT_EQ(leaf.grad().sum().item<float>(), 3);
  EXPECT_EQ(log().live(), 0);
}

TEST_F(SavedTensorScopeTest, ScalarsAndEmptyTensorsAreSavedLikeOthers) {
  std::vector<int64_t> sizes;
  log().on_pack = [&](const Tensor& t) { sizes.push_back(t.numel()); };
  const Tensor scalar = at::ones({}).set_requires_grad(true);
  const Tensor empty = at::empty({0, 3}).set_requires_grad(true);
  Tensor y;
  {
    const SavedTensorScope scope(&policy);
    y = scalar.exp() * scalar + empty.sin().sum();
  }
  EXPECT_THAT(sizes, ::testing::IsSupersetOf({1, 0}));
  y.backward();
  EXPECT_FLOAT_EQ(scalar.grad().item<float>(), 2 * std::exp(1.0F));
  EXPECT_EQ(empty.grad().sizes(), at::IntArrayRef({0, 3}));
}

TEST_F(SavedTensorScopeTest, UndefinedTensorsAndWrappedNumbersAreNeverPacked) {
  const Tensor input = at::randn({3, 2}).set_requires_grad(true);
  log().on_pack = [](const Tensor& t) {
    EXPECT_TRUE(t.defined());
    EXPECT_FALSE(t.unsafeGetTensorImpl()->is_wrapped_number());
  };
  Tensor y;
  {
    const SavedTensorScope scope(&policy);
    const Tensor normal = at::batch_norm(input, {}, {}, {}, {}, /*training=*/true, 0.1, 1e-5, /*cudnn_enabled=*/false);
    EXPECT_GT(log().packed, 0);
    Tensor number = at::ones({}, at::kDouble);
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    const int before = log().packed;
    y = normal * number;
    EXPECT_EQ(log().packed, before);
  }
  y.sum().backward();
  EXPECT_TRUE(input.grad().defined());
}

TEST_F(SavedTensorScopeTest, InPlaceOperatorsThatSaveTheirResultWork) {
  Tensor y;
  {
    const SavedTensorScope scope(&policy);
    y = (x * 3).sigmoid_();
  }
  y.sum().backward();
  const Tensor grad = std::exchange(x.mutable_grad(), Tensor());
  (x * 3).sigmoid_().sum().backward();
  EXPECT_TRUE(at::equal(grad, x.grad()));
  EXPECT_EQ(log().live(), 0);
}

struct Square : ag::Function<Square> {
  static Tensor forward(ag::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static ag::variable_list backward(ag::AutogradContext* context, const ag::variable_list& grads) {
    return {2 * context->get_saved_variables()[0] * grads[0]};
  }
};

TEST_F(SavedTensorScopeTest, CustomFunctionsAreCovered) {
  Tensor y;
  {
    const SavedTensorScope scope(&policy);
    y = Square::apply(x);
  }
  EXPECT_EQ(log().packed, 1);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * x));
  EXPECT_EQ(log().live(), 0);
}

TEST_F(SavedTensorScopeTest, AGraphOutlivesItsPolicy) {
  Tensor loss;
  {
    RecordingPolicy short_lived;
    const SavedTensorScope scope(&short_lived);
    loss = net.loss(x);
  }
  loss.backward();
  EXPECT_TRUE(same(net.take_grads(x), expected));
}

TEST_F(SavedTensorScopeTest, AScopeClosedOutOfTurnIsReportedAndTheOthersStaySound) {
  std::string text;
  LogSink former = set_log_sink([&](LogLevel, const std::string& message) { text = message; });
  RecordingPolicy inner;
  std::optional<SavedTensorScope> first(&policy);
  std::optional<SavedTensorScope> second(&inner);
  first.reset();
  set_log_sink(std::move(former));
  EXPECT_THAT(text, HasSubstr("innermost first"));
  x.sin();
  EXPECT_EQ(inner.log().made, 1);
  second.reset();
  EXPECT_EQ(SavedTensorScope::current(), nullptr);
}

}  // namespace
}  // namespace neap::autograd::testing
