#include "neap/autograd/hook_point.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <array>
#include <atomic>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "neap/autograd/event_log_hook.h"
#include "neap/autograd/named_hook_points.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/test_support.h"
#include "neap/base/error.h"

namespace neap::autograd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Tensor leaf() { return at::ones({3}).set_requires_grad(true); }

TEST(HookPoint, WithoutHooksIsAPlainCall) {
  HookPoint point;
  EXPECT_FALSE(point.has_hooks());
  const Tensor x = leaf();
  const Tensor y = point.run({x}, [&] { return x * 2; });
  EXPECT_EQ(y.grad_fn()->name(), (x * 2).grad_fn()->name());
  // A move, not a copy: the result has one owner.
  EXPECT_EQ(point.run({x}, [&] { return x * 2; }).use_count(), 1U);
}

TEST(HookPoint, HooksNestByOrderAndThenByAttachment) {
  HookPoint point;
  std::vector<std::string> events;
  const HookHandle recompute = point.attach(std::make_shared<EventLogHook>(events, "recompute"), HookOrder::kRecompute);
  const HookHandle offload = point.attach(std::make_shared<EventLogHook>(events, "offload"), HookOrder::kOffload);
  const HookHandle second = point.attach(std::make_shared<EventLogHook>(events, "offload2"), HookOrder::kOffload);
  const HookHandle shard = point.attach(std::make_shared<EventLogHook>(events, "shard"), HookOrder::kShard);
  EXPECT_TRUE(point.has_hooks());
  const Tensor x = leaf();
  const Tensor y = point.run({x}, [&] {
    events.push_back("body");
    return x * 2;
  });
  EXPECT_THAT(events, ElementsAre("shard >", "offload >", "offload2 >", "recompute >", "body", "recompute <",
                                  "offload2 <", "offload <", "shard <"));
  events.clear();
  y.sum().backward();
  EXPECT_THAT(events, ElementsAre("shard before", "offload before", "offload2 before", "recompute before",
                                  "recompute after", "offload2 after", "offload after", "shard after"));
}

TEST(HookPoint, AHandleDetachesWhenItDies) {
  HookPoint point;
  std::vector<std::string> events;
  const Tensor x = leaf();
  {
    HookHandle handle = point.attach(std::make_shared<EventLogHook>(events, "a"), HookOrder::kOffload);
    HookHandle moved = std::move(handle);
    EXPECT_TRUE(moved.attached());
    EXPECT_FALSE(handle.attached());  // NOLINT: the moved-from state is what is tested
    handle.detach();
    EXPECT_TRUE(point.has_hooks());
    moved = point.attach(std::make_shared<EventLogHook>(events, "b"), HookOrder::kOffload);
    point.run({x}, [&] { return x * 2; });
    EXPECT_THAT(events, ElementsAre("b >", "b <"));
  }
  EXPECT_FALSE(point.has_hooks());
}

TEST(HookPoint, AHandleMayOutliveItsHookPointAndHooksDieWithTheirPoint) {
  std::vector<std::string> events;
  auto hook = std::make_shared<EventLogHook>(events, "a");
  HookHandle handle;
  Tensor y;
  {
    HookPoint point;
    handle = point.attach(hook, HookOrder::kShard);
    const Tensor x = leaf();
    y = point.run({x}, [&] { return x * 2; });
  }
  EXPECT_FALSE(handle.attached());
  EXPECT_EQ(hook.use_count(), 1);
  events.clear();
  y.sum().backward();  // the module is gone: nobody to tell
  EXPECT_THAT(events, IsEmpty());
  handle.detach();
}

TEST(HookPoint, RefusesANullHook) {
  HookPoint point;
  EXPECT_THROW(static_cast<void>(point.attach(nullptr, HookOrder::kShard)), UserError);
}

TEST(HookPoint, ExceptionsOfTheBodyPassThroughTheHooks) {
  HookPoint point;
  std::vector<std::string> events;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(events, "a"), HookOrder::kOffload);
  const Tensor x = leaf();
  EXPECT_THROW(point.run({x}, [&]() -> Tensor { throw std::out_of_range("body"); }), std::out_of_range);
  EXPECT_THAT(events, ElementsAre("a >", "a <"));  // the scope around the body was closed
  EXPECT_TRUE(at::equal(point.run({x}, [&] { return x * 2; }), x * 2));
}

class ScopeHook final : public UnitHook {
 public:
  explicit ScopeHook(SavedTensorPolicy* policy) : policy_(policy) {}
  void around_forward(const UnitCall& /*call*/, c10::function_ref<void()> body) override {
    const SavedTensorScope scope(policy_);
    body();
  }

 private:
  SavedTensorPolicy* policy_;
};

TEST(HookPoint, AHookCanOpenAScopeAroundTheBody) {
  HookPoint point;
  RecordingPolicy policy;
  const HookHandle handle = point.attach(std::make_shared<ScopeHook>(&policy), HookOrder::kOffload);
  const Tensor x = leaf();
  const Tensor y = point.run({x}, [&] { return x.sin(); }).cos();
  EXPECT_EQ(policy.log().packed, 1);  // the sine's input, not the cosine's
  EXPECT_THROW(point.run({x}, [&]() -> Tensor { throw std::runtime_error("body"); }), std::runtime_error);
  EXPECT_EQ(SavedTensorScope::current(), nullptr);
  y.sum().backward();
  EXPECT_EQ(policy.log().live(), 0);
}

struct ThrowingHook final : UnitHook {
  void around_forward(const UnitCall&, c10::function_ref<void()>) override { throw std::logic_error("hook"); }
};

TEST(HookPoint, ExceptionsOfAHookReachTheCallerOfForward) {
  HookPoint point;
  const Tensor x = leaf();
  {
    const HookHandle handle = point.attach(std::make_shared<ThrowingHook>(), HookOrder::kShard);
    EXPECT_THROW(point.run({x}, [&] { return x * 2; }), std::logic_error);
  }
  EXPECT_TRUE(at::equal(point.run({x}, [&] { return x * 2; }), x * 2));
}

struct RepeatingHook final : UnitHook {
  explicit RepeatingHook(int n) : times(n) {}
  void around_forward(const UnitCall&, c10::function_ref<void()> body) override {
    for (int i = 0; i < times; ++i) body();
  }
  int times;
};

struct SwallowingHook final : UnitHook {
  void around_forward(const UnitCall&, c10::function_ref<void()> body) override {
    try {
      body();
    } catch (...) {
    }
  }
};

TEST(HookPoint, AHookThatDoesNotRunTheBodyOnceIsAnError) {
  const Tensor x = leaf();
  for (const int times : {0, 2}) {
    HookPoint point;
    const HookHandle handle = point.attach(std::make_shared<RepeatingHook>(times), HookOrder::kShard);
    EXPECT_THROW(point.run({x}, [&] { return x * 2; }), InternalError) << times;
  }
  HookPoint point;
  const HookHandle handle = point.attach(std::make_shared<SwallowingHook>(), HookOrder::kShard);
  EXPECT_THROW(point.run({x}, [&]() -> Tensor { throw std::runtime_error("body"); }), InternalError);
}

TEST(HookPoint, ForwardHooksRunWithoutGradToo) {
  HookPoint point;
  std::vector<std::string> events;
  const HookHandle handle = point.attach(std::make_shared<EventLogHook>(events, "a"), HookOrder::kShard);
  const Tensor x = leaf();
  {
    const at::NoGradGuard no_grad;
    point.run({x}, [&] { return x * 2; });
  }
  {
    const c10::InferenceMode inference;
    point.run({x}, [&] { return x * 2; });
  }
  EXPECT_THAT(events, ElementsAre("a >", "a <", "a >", "a <"));
}

TEST(HookPoint, EachCallHasAnIdOfItsOwn) {
  HookPoint first, second;
  std::vector<std::string> events;
  auto hook = std::make_shared<EventLogHook>(events, "a");
  const HookHandle one = first.attach(hook, HookOrder::kOffload);
  const HookHandle two = second.attach(hook, HookOrder::kOffload);
  const Tensor x = leaf();
  std::map<uint64_t, HookPoint*> calls;
  for (HookPoint* point : {&first, &second, &first}) {
    point->run({x}, [&] { return x * 2; });
    EXPECT_EQ(hook->last_unit, point);
    calls.emplace(hook->last_id, point);
  }
  EXPECT_EQ(calls.size(), 3U);
}

TEST(HookPoint, AttachingAndDetachingDuringForwardIsSafe) {
  HookPoint point;
  std::vector<std::thread> threads;
  std::atomic<bool> stop = false;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      const at::NoGradGuard no_grad;
      const Tensor x = at::ones({3});
      while (!stop) wrong += !at::equal(point.run({x}, [&] { return x; }), x);
    });
  }
  for (int i = 0; i < 500; ++i) {
    const HookHandle a = point.attach(std::make_shared<RepeatingHook>(1), HookOrder::kShard);
    const HookHandle b = point.attach(std::make_shared<RepeatingHook>(1), HookOrder::kOffload);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_FALSE(point.has_hooks());
}

struct Output {
  Tensor logits;
  std::vector<Tensor> hidden;
};
template <class Visit>
void visit_tensors(const Output& output, Visit&& visit) {
  visit(output.logits);
  for (const Tensor& tensor : output.hidden) visit(tensor);
}

TEST(VisitTensors, LooksIntoNestedValuesAndStructsThatVisitThemselves) {
  const Tensor a = at::ones({1}), b = at::ones({2}), c = at::ones({3});
  const auto sizes = [](const auto& value) {
    std::vector<int64_t> found;
    for_each_tensor(value, [&](const Tensor& tensor) { found.push_back(tensor.numel()); });
    return found;
  };
  EXPECT_THAT(sizes(a), ElementsAre(1));
  EXPECT_THAT(sizes(std::vector<Tensor>{a, b}), ElementsAre(1, 2));
  EXPECT_THAT(sizes(std::array<Tensor, 2>{b, a}), ElementsAre(2, 1));
  EXPECT_THAT(sizes(std::make_tuple(a, 7, std::string("text"), std::pair(b, std::optional<Tensor>(c)))),
              ElementsAre(1, 2, 3));
  EXPECT_THAT(sizes(std::vector<std::optional<Tensor>>{std::nullopt, b}), ElementsAre(2));
  EXPECT_THAT(sizes(std::map<std::string, Tensor>{{"x", c}}), ElementsAre(3));
  EXPECT_THAT(sizes(std::vector<Output>{{a, {b, c}}}), ElementsAre(1, 2, 3));
  EXPECT_THAT(sizes(42), IsEmpty());
}

class UnitImpl : public torch::nn::Module, public Hookable {
 public:
  Tensor forward(const Tensor& x) {
    return hook_point().run({x}, [&] { return x * 2; });
  }
};

struct PlainImpl : torch::nn::Module {
  using torch::nn::Module::register_module;
};

TEST(NamedHookPoints, AreFoundByDottedNameInOrder) {
  PlainImpl root;  // not owned by a shared_ptr
  auto layers = root.register_module("layers", std::make_shared<PlainImpl>());
  auto first = layers->register_module("0", std::make_shared<UnitImpl>());
  auto second = layers->register_module("1", std::make_shared<UnitImpl>());
  root.register_module("tied", first);
  std::vector<std::string> names;
  std::vector<HookPoint*> points;
  for (const NamedHookPoint& found : find_hookables(root)) {
    names.push_back(found.name);
    points.push_back(found.point);
  }
  EXPECT_THAT(names, ElementsAre("layers.0", "layers.1", "tied"));
  EXPECT_THAT(points, ElementsAre(&first->hook_point(), &second->hook_point(), &first->hook_point()));
  EXPECT_THAT(module_names(root), ElementsAre("", "layers", "layers.0", "layers.1", "tied"));
  EXPECT_THAT(find_hookables(*first), ::testing::SizeIs(1));
}

TEST(NamedHookPoints, AreChosenByPatternWithTheirPlaceInTheModel) {
  PlainImpl root;
  root.register_module("head", std::make_shared<UnitImpl>());
  auto layers = root.register_module("layers", std::make_shared<PlainImpl>());
  for (const char* name : {"0", "1", "2"}) layers->register_module(name, std::make_shared<UnitImpl>());
  const auto chosen = select_hook_points(root, {"2", "layers.0"}, "section");
  ASSERT_THAT(chosen, ::testing::SizeIs(2));
  EXPECT_EQ(chosen[0].name, "layers.0");
  EXPECT_EQ(chosen[0].order, 1U);
  EXPECT_EQ(chosen[1].name, "layers.2");
  EXPECT_EQ(chosen[1].order, 3U);
  EXPECT_THAT(select_hook_points(root, {}, "section"), ::testing::SizeIs(3));
  EXPECT_THROW(select_hook_points(root, {"layers"}, "section"), UserError);
}

TEST(NamedHookPoints, ACopiedModuleStartsWithoutHooks) {
  UnitImpl original;
  std::vector<std::string> events;
  const HookHandle handle =
      original.hook_point().attach(std::make_shared<EventLogHook>(events, "a"), HookOrder::kOffload);
  UnitImpl copy = original;
  EXPECT_FALSE(copy.hook_point().has_hooks());
  copy = original;
  EXPECT_FALSE(copy.hook_point().has_hooks());
  EXPECT_TRUE(original.hook_point().has_hooks());
  copy.forward(leaf());
  EXPECT_THAT(events, IsEmpty());
}

}  // namespace
}  // namespace neap::autograd::testing
