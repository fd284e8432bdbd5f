// When the backward events of a unit come.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "neap/autograd/event_log_hook.h"
#include "neap/autograd/hook_point.h"
#include "neap/autograd/test_support.h"

namespace neap::autograd::testing {
namespace {

namespace ag = torch::autograd;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Writes its name when gradients pass through it.
struct Mark : ag::Function<Mark> {
  static Tensor forward(ag::AutogradContext* context, const Tensor& x, std::vector<std::string>* events,
                        const std::string& name) {
    context->saved_data["events"] = reinterpret_cast<int64_t>(events);
    context->saved_data["name"] = name;
    return x.clone();
  }
  static ag::variable_list backward(ag::AutogradContext* context, const ag::variable_list& grads) {
    reinterpret_cast<std::vector<std::string>*>(context->saved_data["events"].toInt())
        ->push_back(context->saved_data["name"].toStringRef());
    return {grads[0], Tensor(), Tensor()};
  }
};

class UnitBackwardTest : public ::testing::Test {
 protected:
  // A unit with a hook and two parameters.
  struct Unit {
    Unit(std::vector<std::string>& log, const std::string& unit_name)
        : events(log), name(unit_name), hook(std::make_shared<EventLogHook>(log, unit_name)) {
      handle = point.attach(hook, HookOrder::kOffload);
    }
    Tensor operator()(const Tensor& x) {
      return point.run({x},
                       [&] { return x + at::linear(Mark::apply(x, &events, name + " body").tanh(), weight, bias); });
    }
    std::vector<std::string>& events;
    std::string name;
    std::shared_ptr<EventLogHook> hook;
    HookPoint point;
    HookHandle handle;
    Tensor weight = at::randn({3, 3}).set_requires_grad(true);
    Tensor bias = at::zeros({3}).set_requires_grad(true);
  };

  Tensor mark(const Tensor& tensor, const std::string& name) { return Mark::apply(tensor, &backward, name); }
  // Leaves only what backward does.
  void start_backward() { backward.clear(); }

  std::vector<std::string> backward;
  Unit a{backward, "a"}, b{backward, "b"};
  Tensor x = at::randn({2, 3}).set_requires_grad(true);
};

TEST_F(UnitBackwardTest, EventsEncloseTheUnitsOwnWork) {
  const Tensor y = mark(b(a(mark(x, "first"))), "last").sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("last", "b before", "b body", "b after", "a before", "a body", "a after", "first"));
}

TEST_F(UnitBackwardTest, AnOutputMayBeTheRootOfThePass) {
  const Tensor loss = a.point.run({x}, [&] { return at::linear(Mark::apply(x, &backward, "a body"), a.weight).sum(); });
  start_backward();
  loss.backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after"));
}

TEST_F(UnitBackwardTest, TheEndIsLookedForWhereSomebodyWantsIt) {
  struct BeginOnly final : UnitHook {
    explicit BeginOnly(std::vector<std::string>& log) : events(log) {}
    void before_backward(const UnitCall& /*call*/) override { events.emplace_back("begin"); }
    void after_backward(const UnitCall& /*call*/) override { events.emplace_back("end"); }
    bool wants_after_backward() const override { return false; }
    std::vector<std::string>& events;
  };
  HookPoint point;
  const auto handle = point.attach(std::make_shared<BeginOnly>(backward), HookOrder::kOffload);
  const auto loss_of = [&](const Tensor& input) {
    return point.run({input}, [&] { return mark(input, "body").sum(); });
  };
  Tensor loss = loss_of(mark(x, "first"));
  start_backward();
  loss.backward();
  // No sooner than the pass ends, which is what it costs nothing to know.
  EXPECT_THAT(backward, ElementsAre("begin", "body", "first", "end"));

  const auto other = std::make_shared<EventLogHook>(backward, "other");
  const auto other_handle = point.attach(other, HookOrder::kRecompute);
  loss = loss_of(mark(x, "first"));
  start_backward();
  loss.backward();
  EXPECT_THAT(backward, ElementsAre("begin", "other before", "body", "other after", "end", "first"));
}

TEST_F(UnitBackwardTest, DoesNotChangeGradients) {
  const auto grads = [&](bool hooked) {
    if (!hooked) {
      a.handle.detach();
      b.handle.detach();
    }
    b(a(x)).pow(2).sum().backward();
    Tensors result;
    for (Tensor* t : {&x, &a.weight, &a.bias, &b.weight, &b.bias})
      result.push_back(std::exchange(t->mutable_grad(), {}));
    return result;
  };
  const Tensors hooked = grads(true);
  EXPECT_TRUE(same(hooked, grads(false)));
}

TEST_F(UnitBackwardTest, AnInputWithOtherConsumersDoesNotDelayTheEnd) {
  // x's own gradient is complete only when both units have run; each unit ends by itself.
  const Tensor shared = mark(x, "shared");
  const Tensor from_a = a(shared);
  const Tensor y = (from_a + mark(b(shared), "between")).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward,
              ElementsAre("between", "b before", "b body", "b after", "a before", "a body", "a after", "shared"));
}

TEST_F(UnitBackwardTest, AnInputThatNeedsNoGradientDoesNotDelayTheEnd) {
  const Tensor y = mark(b(a(at::ones({2, 3}))), "last").sum();
  start_backward();
  y.backward();
  // a's Mark has no gradient to pass on and is not part of the graph.
  EXPECT_THAT(backward, ElementsAre("last", "b before", "b body", "b after", "a before", "a after"));
}

TEST_F(UnitBackwardTest, ARetainedGraphBringsTheEventsAgain) {
  const Tensor y = a(x).sum();
  start_backward();
  y.backward({}, /*retain_graph=*/true);
  y.backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after", "a before", "a body", "a after"));
}

TEST_F(UnitBackwardTest, SeveralForwardsBeforeOneBackwardAreToldApart) {
  const Tensor first = a(x);
  const uint64_t first_id = a.hook->last_id;
  const Tensor second = a(x);
  const uint64_t second_id = a.hook->last_id;
  start_backward();
  (first + second).sum().backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after", "a before", "a body", "a after"));
  EXPECT_THAT(a.hook->before_ids, ElementsAre(second_id, first_id));
  EXPECT_THAT(a.hook->after_ids, ElementsAre(second_id, first_id));
}

TEST_F(UnitBackwardTest, AUnitCalledTwiceInARowHasTwoPairs) {
  const Tensor y = a(a(x)).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after", "a before", "a body", "a after"));
}

TEST_F(UnitBackwardTest, NestedUnitsNestInBackward) {
  HookPoint outer;
  const HookHandle handle = outer.attach(std::make_shared<EventLogHook>(backward, "outer"), HookOrder::kOffload);
  const Tensor y = outer.run({x}, [&] { return b(a(x)); }).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("outer before", "b before", "b body", "b after", "a before", "a body", "a after",
                                    "outer after"));
}

TEST_F(UnitBackwardTest, NothingFiresWithoutGrad) {
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(a(x).requires_grad());
  }
  const Tensor plain = at::ones({2, 3});
  HookPoint point;
  const HookHandle handle = point.attach(a.hook, HookOrder::kShard);
  const Tensor unrelated = point.run({plain}, [&] { return plain * 2; });
  start_backward();
  (x * unrelated).sum().backward();
  EXPECT_THAT(backward, IsEmpty());
}

TEST_F(UnitBackwardTest, AnInputHandedThroughIsNoWorkOfTheUnit) {
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "id"), HookOrder::kShard);
  const Tensor h = x * 2;
  const Tensor same_leaf = point.run({x}, [&] { return x; });
  const Tensor same_inner = point.run({h}, [&] { return h; });
  start_backward();
  (same_leaf + same_inner).sum().backward();
  EXPECT_THAT(backward, IsEmpty());
}

TEST_F(UnitBackwardTest, SeveralOutputsCountAsOneUnit) {
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "two"), HookOrder::kOffload);
  const auto run = [&] {
    return point.run({x}, [&] {
      const Tensor left = mark(x, "left") * 2;
      return std::make_tuple(left, std::vector<Tensor>{mark(x, "right") * 3});
    });
  };
  {
    const auto [left, right] = run();
    const Tensor y = (left + right[0]).sum();
    start_backward();
    y.backward();
    EXPECT_THAT(backward, ElementsAre("two before", "right", "left", "two after"));
  }
  {  // An output that is not used leaves its branch out, and the end does not wait for it.
    const auto [left, right] = run();
    const Tensor y = mark(left, "last").sum();
    start_backward();
    y.backward();
    EXPECT_THAT(backward, ElementsAre("last", "two before", "left", "two after"));
  }
}

TEST_F(UnitBackwardTest, OutputsOfOneNodeCountOnce) {
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "chunk"), HookOrder::kOffload);
  const std::vector<Tensor> parts = point.run({x}, [&] { return (x * 2).unbind(1); });
  start_backward();
  (parts[0] + parts[2]).sum().backward();
  EXPECT_THAT(backward, ElementsAre("chunk before", "chunk after"));
}

TEST_F(UnitBackwardTest, WorkThatIsLeftOutByInputsEndsTheUnitEarlier) {
  const Tensor inner = a(mark(x, "first"));
  const Tensor y = mark(b(inner), "last").sum();
  start_backward();
  ag::grad({y}, {inner}, {}, /*retain_graph=*/true);  // stops before a
  EXPECT_THAT(backward, ElementsAre("last", "b before", "b body", "b after"));
  start_backward();
  ag::grad({y}, {a.weight}, {}, /*retain_graph=*/true);  // needs a's linear layer but not its body
  EXPECT_THAT(backward, ElementsAre("last", "b before", "b body", "b after", "a before", "a after"));
  start_backward();
  ag::backward({y}, {}, std::nullopt, false, {x});
  EXPECT_THAT(backward, ElementsAre("last", "b before", "b body", "b after", "a before", "a body", "a after", "first"));
}

TEST_F(UnitBackwardTest, AUnitThatStopsInTheMiddleEndsWithThePass) {
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "u"), HookOrder::kOffload);
  Tensor middle;
  const Tensor y = point.run({x}, [&] {
    middle = mark(x, "early") * 2;
    return mark(middle, "late");
  });
  start_backward();
  ag::grad({y.sum()}, {middle});
  EXPECT_THAT(backward, ElementsAre("u before", "late", "u after"));
}

TEST_F(UnitBackwardTest, DoubleBackwardGivesAPairPerPassThatReachesTheOutputs) {
  const Tensor y = a(x).pow(2).sum();
  start_backward();
  const Tensor first = ag::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after"));
  start_backward();
  first.pow(2).sum().backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after"));
  Tensor with = std::exchange(x.mutable_grad(), Tensor());
  a.handle.detach();
  ag::grad({a(x).pow(2).sum()}, {x}, {}, std::nullopt, true)[0].pow(2).sum().backward();
  EXPECT_TRUE(at::equal(with, x.grad()));
}

TEST_F(UnitBackwardTest, InPlaceChangesOfInputsAndOutputsKeepTheEvents) {
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "u"), HookOrder::kOffload);
  const Tensor input = mark(x, "first") * 2;
  const Tensor output = point.run({input}, [&] { return mark(input.add_(1), "inside"); });
  output.mul_(3);
  start_backward();
  mark(output, "last").sum().backward();
  EXPECT_THAT(backward, ElementsAre("last", "u before", "inside", "u after", "first"));
}

TEST_F(UnitBackwardTest, AViewWhoseBaseChangedIsNotTakenForTheUnitsWork) {
  // A view's node is made anew when it is asked for after its base was modified: that must not happen inside the unit.
  const Tensor base = mark(x, "first") * 2;
  const Tensor view = base.view({3, 2});
  base.add_(1);
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "u"), HookOrder::kOffload);
  const Tensor y = point.run({view}, [&] { return mark(view, "inside"); }).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("u before", "inside", "u after", "first"));
}

TEST_F(UnitBackwardTest, AnInputFromAnotherThreadIsOutside) {
  // Sequence numbers count per thread, and the other thread's are far ahead.
  Tensor input;
  std::thread([&] {
    Tensor busy = x * 1;
    for (int i = 0; i < 10000; ++i) busy = busy * 1;
    input = mark(x, "first") * 2;
  }).join();
  const Tensor y = a(input).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after", "first"));
}

TEST_F(UnitBackwardTest, BackwardOnAnotherThreadBringsTheEventsThere) {
  const Tensor y = b(a(x)).sum();
  std::thread::id thread;
  a.hook->on_before = [&] { thread = std::this_thread::get_id(); };
  start_backward();
  std::thread worker([&] { y.backward(); });
  const std::thread::id id = worker.get_id();
  worker.join();
  EXPECT_EQ(thread, id);
  EXPECT_THAT(backward, ElementsAre("b before", "b body", "b after", "a before", "a body", "a after"));
}

TEST_F(UnitBackwardTest, ConcurrentBackwardsOverOneRetainedGraphEachHaveAPair) {
  HookPoint point;
  std::vector<std::string> events;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(events, "u"), HookOrder::kOffload);
  const Tensor y = point.run({x}, [&] { return (x * 2).tanh(); }).sum();
  events.clear();
  std::vector<std::thread> threads;
  constexpr int kThreads = 4, kPasses = 25;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kPasses; ++i) ag::grad({y}, {x}, {}, /*retain_graph=*/true);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(events.begin(), events.end(), "u before"), kThreads * kPasses);
  EXPECT_EQ(std::count(events.begin(), events.end(), "u after"), kThreads * kPasses);
}

TEST_F(UnitBackwardTest, AnExceptionInTheUnitsBackwardEndsItAsFailed) {
  Tensor y = b(a(x)).sum();
  a.hook->on_before = [] { throw std::out_of_range("before"); };
  start_backward();
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), std::out_of_range);
  EXPECT_THAT(backward, ElementsAre("b before", "b body", "b after", "a before", "a failed"));
  a.hook->on_before = nullptr;
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("b before", "b body", "b after", "a before", "a body", "a after"));
}

struct Fail : ag::Function<Fail> {
  static Tensor forward(ag::AutogradContext*, const Tensor& x) { return x.clone(); }
  static ag::variable_list backward(ag::AutogradContext*, const ag::variable_list&) { throw std::out_of_range("node"); }
};

TEST_F(UnitBackwardTest, AnExceptionOfANodeEndsEveryOpenUnitAsFailed) {
  HookPoint outer, inner;
  const HookHandle one = outer.attach(std::make_shared<EventLogHook>(backward, "outer"), HookOrder::kOffload);
  const HookHandle two = inner.attach(std::make_shared<EventLogHook>(backward, "inner"), HookOrder::kOffload);
  Tensor y = outer.run({x}, [&] { return b(inner.run({x}, [&] { return Fail::apply(x) * 2; })); }).sum();
  start_backward();
  EXPECT_THROW(y.backward(), std::out_of_range);
  y = Tensor();
  EXPECT_THAT(std::vector<std::string>(backward.begin(), backward.begin() + 5),
              ElementsAre("outer before", "b before", "b body", "b after", "inner before"));
  EXPECT_THAT(std::vector<std::string>(backward.begin() + 5, backward.end()),
              ::testing::UnorderedElementsAre("outer failed", "inner failed"));
}

TEST_F(UnitBackwardTest, AnExceptionFromAfterBackwardReachesTheCallerAndTheOtherHooksAreStillCalled) {
  const HookHandle shard = a.point.attach(std::make_shared<EventLogHook>(backward, "shard"), HookOrder::kShard);
  const Tensor y = a(x).sum();
  a.hook->on_after = [] { throw std::out_of_range("after"); };
  start_backward();
  EXPECT_THROW(y.backward(), std::out_of_range);
  EXPECT_THAT(backward, ElementsAre("shard before", "a before", "a body", "a after", "shard after"));
}

TEST_F(UnitBackwardTest, ADetachedHookHearsNothingOfOlderGraphs) {
  const Tensor y = b(a(x)).sum();
  a.handle.detach();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("b before", "b body", "b after", "a body"));
}

TEST_F(UnitBackwardTest, ADroppedGraphFreesWhatItRemembered) {
  std::weak_ptr<EventLogHook> hook = a.hook;
  Tensor y = a(x).sum();
  y.backward({}, /*retain_graph=*/true);
  a.handle.detach();
  a.hook.reset();
  EXPECT_TRUE(hook.expired());  // the graph is alive and holds neither hook
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = y.storage().getWeakStorageImpl();
  y = Tensor();
  EXPECT_TRUE(storage.expired());
}

TEST_F(UnitBackwardTest, WhatLeavesAUnitByTheSideAloneBringsNoEvents) {
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(backward, "u"), HookOrder::kOffload);
  Tensor side;
  Tensor y = point.run({x}, [&] {
    side = mark(x, "inside");
    return side * 2;
  });
  y = Tensor();  // part of the unit's graph dies, its exit lives on
  start_backward();
  side.sum().backward();
  EXPECT_THAT(backward, ElementsAre("inside"));
}

struct Reentrant : ag::Function<Reentrant> {
  static Tensor forward(ag::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return x.clone();
  }
  static ag::variable_list backward(ag::AutogradContext* context, const ag::variable_list& grads) {
    const at::AutoGradMode grad(true);
    const Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    (*unit)(x).sum().backward();
    return {grads[0] + x.grad()};
  }
  static inline std::function<Tensor(const Tensor&)>* unit = nullptr;
};

TEST_F(UnitBackwardTest, AReentrantBackwardHasItsOwnPairs) {
  std::function<Tensor(const Tensor&)> unit = [&](const Tensor& input) { return b(input); };
  Reentrant::unit = &unit;
  HookPoint outer;
  const HookHandle handle = outer.attach(std::make_shared<EventLogHook>(backward, "outer"), HookOrder::kOffload);
  const Tensor y = outer.run({x}, [&] { return Reentrant::apply(x) * 2; }).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("outer before", "b >", "b <", "b before", "b body", "b after", "outer after"));
}

TEST_F(UnitBackwardTest, EventsComeInAnomalyModeToo) {
  ag::AnomalyMode::set_enabled(true);
  const ScopeExit restore([] { ag::AnomalyMode::set_enabled(false); });
  const Tensor y = a(x).sum();
  start_backward();
  y.backward();
  EXPECT_THAT(backward, ElementsAre("a before", "a body", "a after"));
}

}  // namespace
}  // namespace neap::autograd::testing
