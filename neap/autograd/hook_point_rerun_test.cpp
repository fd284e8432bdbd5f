// Units that can be run again: what a hook gets for it, and why nothing that a later run uses can have died.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "neap/autograd/event_log_hook.h"
#include "neap/autograd/hook_point.h"
#include "neap/autograd/op_name.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/base/error.h"

namespace neap::autograd::testing {
namespace {

using at::Tensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Shift {
  Tensor by;
};
template <class Visit>
void visit_tensors(const Shift& shift, Visit&& visit) {
  visit(shift.by);
}

class Unit : public torch::nn::Module, public Hookable {
 public:
  Tensor forward(const Tensor& a, const Tensor& b, int64_t factor = 1, const Shift& shift = {}) {
    return hook_point().run(*this, {a, b}, &Unit::body, factor, shift);
  }

  std::vector<std::string> seen;  // what body() was given
  bool was_rerun = false;

 private:
  Tensor body(const Tensor& a, const Tensor& b, int64_t factor, const Shift& shift) {
    seen.push_back(std::to_string(a.item<float>()).substr(0, 1) + std::to_string(b.item<float>()).substr(0, 1) + "x" +
                   std::to_string(factor));
    was_rerun = running_again();
    const Tensor sum = (a + b) * factor;
    return shift.by.defined() ? sum + shift.by : sum;
  }
};

Tensor number(double value) { return at::full({1}, value); }

// Keeps a way to run each call again.
struct KeepingHook final : UnitHook {
  void around_repeatable(const UnitCall&, const UnitForward& forward) override {
    inputs.assign(forward.inputs().begin(), forward.inputs().end());
    again = forward.again();
    forward.body()();
  }
  std::vector<Tensor> inputs;
  Rerun again;
};

class RerunTest : public ::testing::Test {
 protected:
  std::string error_of_rerun() {
    try {
      hook->again({number(3), number(4)});
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no error";
  }

  std::shared_ptr<Unit> unit = std::make_shared<Unit>();
  std::shared_ptr<KeepingHook> hook = std::make_shared<KeepingHook>();
  HookHandle handle = unit->hook_point().attach(hook, HookOrder::kRecompute);
};

TEST_F(RerunTest, TheBodyGetsTheInputsOfEachRunAndTheArgumentsOfTheCall) {
  {
    const int64_t factor = 2;  // gone before the second run
    const Tensor y = unit->forward(number(1), number(2), factor);
    EXPECT_EQ(y.item<float>(), 6);
  }
  ASSERT_EQ(hook->inputs.size(), 2U);
  EXPECT_EQ(hook->inputs[1].item<float>(), 2);
  EXPECT_FALSE(unit->was_rerun);
  hook->again({number(3), number(4)});
  EXPECT_THAT(unit->seen, ElementsAre("12x2", "34x2"));
  EXPECT_TRUE(unit->was_rerun);
  EXPECT_FALSE(running_again());
}

TEST_F(RerunTest, WithoutHooksTheBodyIsCalledAndNothingIsKept) {
  handle.detach();
  const Tensor a = number(1);
  unit->forward(a, number(2), 3);
  EXPECT_THAT(unit->seen, ElementsAre("12x3"));
  EXPECT_EQ(a.use_count(), 1U);
}

TEST_F(RerunTest, TensorsAmongTheArgumentsMustNotHaveChanged) {
  const Tensor by = number(1);
  unit->forward(number(1), number(2), 1, {by});
  EXPECT_EQ(error_of_rerun(), "no error");
  by.add_(1);  // full() itself counts as one
  EXPECT_THAT(error_of_rerun(),
              HasSubstr("modified by an inplace operation: [CPUFloatType [1]] is at version 2; expected version 1"));
}

TEST_F(RerunTest, TheModuleMustBeAlive) {
  unit->forward(number(1), number(2));
  unit.reset();
  EXPECT_THAT(error_of_rerun(), HasSubstr("keep the model until backward is done"));
}

TEST_F(RerunTest, AModuleThatNobodySharesMustBeAliveToo) {
  auto owned = std::make_unique<Unit>();
  const HookHandle attached = owned->hook_point().attach(hook, HookOrder::kRecompute);
  owned->forward(number(1), number(2));
  EXPECT_EQ(error_of_rerun(), "no error");
  EXPECT_THAT(owned->seen, ElementsAre("12x1", "34x1"));
  owned.reset();
  EXPECT_THAT(error_of_rerun(), HasSubstr("keep the model until backward is done"));
}

TEST_F(RerunTest, AModuleIsKeptWhileItRunsAgain) {
  struct DroppingUnit : torch::nn::Module, Hookable {
    Tensor forward(const Tensor& x) { return hook_point().run(*this, {x}, &DroppingUnit::body); }
    Tensor body(const Tensor& x) {
      if (owner != nullptr) owner->reset();
      return x * (weak_from_this().expired() ? 0 : 1);
    }
    std::shared_ptr<DroppingUnit>* owner = nullptr;
  };
  auto dropping = std::make_shared<DroppingUnit>();
  const HookHandle attached = dropping->hook_point().attach(hook, HookOrder::kRecompute);
  dropping->forward(number(1));
  dropping->owner = &dropping;
  hook->again({number(1)});
  EXPECT_EQ(dropping, nullptr);
}

TEST_F(RerunTest, RunsWhatIsInsideOfTheHookAndNothingAround) {
  std::vector<std::string> events;
  auto inner_keeper = std::make_shared<KeepingHook>();
  const HookHandle shard =
      unit->hook_point().attach(std::make_shared<EventLogHook>(events, "shard"), HookOrder::kShard);
  HookHandle inside =
      unit->hook_point().attach(std::make_shared<EventLogHook>(events, "inside"), HookOrder::kRecompute);
  const HookHandle innermost = unit->hook_point().attach(inner_keeper, HookOrder::kRecompute);
  const Tensor y = unit->forward(number(1).requires_grad_(), number(2));
  inside.detach();  // later runs are those of this call
  events.clear();
  hook->again({number(3), number(4)});
  EXPECT_THAT(events, ElementsAre("inside >", "inside <"));
  events.clear();
  inner_keeper->again({number(5), number(6)});
  EXPECT_THAT(events, IsEmpty());
  EXPECT_THAT(unit->seen, ElementsAre("12x1", "34x1", "56x1"));
  y.sum().backward();
  EXPECT_THAT(events, ElementsAre("shard before", "shard after"));  // of the one call that is in the graph
}

TEST_F(RerunTest, ExceptionsPassAndTheMarkIsTakenBack) {
  struct ThrowingUnit : torch::nn::Module, Hookable {
    Tensor forward(const Tensor& x) { return hook_point().run(*this, {x}, &ThrowingUnit::body); }
    Tensor body(const Tensor& x) {
      if (running_again()) throw std::out_of_range("again");
      return x;
    }
  };
  const auto throwing = std::make_shared<ThrowingUnit>();
  const HookHandle attached = throwing->hook_point().attach(hook, HookOrder::kRecompute);
  throwing->forward(number(1));
  EXPECT_THROW(hook->again({number(1)}), std::out_of_range);
  EXPECT_FALSE(running_again());
}

TEST_F(RerunTest, AnotherThreadMayRunItAgain) {
  unit->forward(number(1), number(2));
  std::thread([again = std::exchange(hook->again, {})] { again({number(3), number(4)}); }).join();
  EXPECT_THAT(unit->seen, ElementsAre("12x1", "34x1"));
}

TEST_F(RerunTest, ABodyWithoutArgumentsCannotRunAgain) {
  HookPoint point;
  const HookHandle attached = point.attach(hook, HookOrder::kRecompute);
  const Tensor x = number(1);
  point.run({x}, [&] { return x * 2; });
  EXPECT_FALSE(hook->again);
  EXPECT_EQ(hook->inputs.size(), 1U);
}

TEST_F(RerunTest, ALambdaWithoutCapturesIsABody) {
  struct LambdaUnit : torch::nn::Module, Hookable {
    std::vector<Tensor> forward(const Tensor& x) {
      return hook_point().run(*this, {x}, [](LambdaUnit& self, const Tensor& in) {
        ++self.calls;
        return std::vector<Tensor>{in, in * 2};
      });
    }
    int calls = 0;
  };
  const auto lambda = std::make_shared<LambdaUnit>();
  const HookHandle attached = lambda->hook_point().attach(hook, HookOrder::kRecompute);
  EXPECT_EQ(lambda->forward(number(2))[1].item<float>(), 4);
  hook->again({number(1)});
  EXPECT_EQ(lambda->calls, 2);
}

TEST(OpNames, TellTheRunningOperatorWhileObserved) {
  struct Probe final : SavedTensorPolicy {
    std::unique_ptr<SavedVariableHooks> make_hook() override {
      names.emplace_back(current_op_name());
      return nullptr;
    }
    std::vector<std::string> names;
  } probe;
  const SavedTensorScope scope(&probe);
  const Tensor x = number(1).requires_grad_();
  {
    const OpNames outer, nested;
    x.sin();
  }
  x.cos();
  EXPECT_THAT(probe.names, ElementsAre("aten::sin", ""));
}

}  // namespace
}  // namespace neap::autograd::testing
