// Scopes without a unit, units that belong to no torch::nn::Module, and whose tensors are somebody else's.
#include <ATen/SavedTensorHooks.h>

#include <optional>

#include "neap/autograd/named_hook_points.h"
#include "neap/base/scope_exit.h"
#include "neap/offload/test_support.h"

namespace neap::offload::testing {
namespace {

using OffloadScope = OffloadTest;

TEST_F(OffloadScope, TakesWhatIsSavedWhileItLives) {
  const Chain plain(4), chain(4);
  const Tensors expected = plain.step();
  Engine engine(all_sizes({.keep_last = 0, .max_in_flight = Bytes(0)}));
  at::Tensor loss;
  {
    const Scope scope(engine);
    loss = chain.loss();
  }
  const at::Tensor later = chain.loss();  // is not its business
  loss.backward();
  for (size_t i = 0; i < chain.weights.size(); ++i) {
    EXPECT_TRUE(bit_equal(chain.weights[i].grad().cpu(), expected[i + 1]));
  }
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.offloaded_bytes, Bytes(5 * Chain::kBytes));  // the input and four outputs
  EXPECT_EQ(report.reloaded_storages, 4);  // the input has another owner, who kept it on the device
}

TEST_F(OffloadScope, UnitsInsideBelongToTheSamePass) {
  const Chain plain(4);
  Chain chain(4);
  const Tensors expected = plain.step();
  Engine engine(all_sizes({.keep_last = 0}));
  engine.attach(*chain.model, {"layers.1", "layers.2"});
  {
    const Scope scope(engine);
    EXPECT_TRUE(bit_equal(chain.step(), expected));  // with backward inside the scope
  }
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.passes, 1);
  EXPECT_EQ(report.offloaded_storages, 5);
}

TEST_F(OffloadScope, LeavesThingsAloneWithoutGradMode) {
  const Chain chain(2);
  Engine engine(all_sizes());
  {
    const at::NoGradGuard no_grad;
    const Scope scope(engine);
    const at::AutoGradMode grad(true);
    chain.loss().backward();
  }
  EXPECT_EQ(engine.take_step_report().saved_tensors, 0);
}

TEST_F(OffloadScope, WhatBackwardSavesWhileItIsOpenStays) {
  const at::Tensor x = draw({Chain::kSide, Chain::kSide}).set_requires_grad(true);
  Engine engine(all_sizes({.keep_last = 0}));
  {
    const Scope scope(engine);
    const at::Tensor y = x.exp();
    EXPECT_EQ(engine.take_step_report().saved_tensors, 0);  // told when the scope ends
    y.sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  }
  EXPECT_EQ(engine.take_step_report().saved_tensors, 1);  // of the forward alone
  x.mutable_grad().reset();
}

TEST_F(OffloadScope, AUnitInsideHooksOfPythonsLeavesItsTensorsToThem) {
  Chain chain(3);
  Engine engine(all_sizes());
  engine.attach(*chain.model);
  // Python's stack without Python, switched off again where a tensor would be saved.
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks({nullptr, nullptr}, {nullptr, nullptr});
  {
    const ScopeExit pop([] { at::SavedTensorDefaultHooks::pop_hooks(); });
    at::SavedTensorDefaultHooks::set_tracing(true);
    const ScopeExit stop([] { at::SavedTensorDefaultHooks::set_tracing(false); });
    chain.loss().backward();
  }
  EXPECT_EQ(engine.take_step_report().saved_tensors, 0);
  chain.loss().backward();
  EXPECT_GT(engine.take_step_report().saved_tensors, 0);
}

TEST_F(OffloadScope, AUnitAtTheAddressOfOneThatHasGoneIsAttached) {
  std::optional<autograd::HookPoint> point(std::in_place);
  Engine engine(all_sizes({.keep_last = 0}));
  engine.attach({.identity = &engine, .units = {{"first", &*point, 0}}});
  point.emplace();
  engine.attach({.identity = &engine, .units = {{"second", &*point, 0}}});
  EXPECT_TRUE(point->has_hooks());
  EXPECT_THAT(engine.unit_names(), ::testing::ElementsAre("second"));
}

TEST_F(OffloadScope, UnitsOfModelsInAnotherLanguage) {
  autograd::HookPoint first, second;
  const at::Tensor frozen = draw({Chain::kSide, Chain::kSide});
  const at::Tensor x = draw({Chain::kSide, Chain::kSide}).set_requires_grad(true);
  Engine engine(all_sizes({.keep_last = 0}));
  const int model = 0;
  engine.attach({.identity = &model,
                 .units = {{"first", &first, 0}, {"second", &second, 1}},
                 .parameters_and_buffers = {frozen}});
  EXPECT_THAT(engine.unit_names(), ::testing::ElementsAre("first", "second"));
  const at::Tensor y = first.run({x}, [&] { return at::matmul(x, frozen).exp(); });
  second.run({y}, [&] { return y.sin(); }).sum().backward();
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.offloaded_storages, 1);  // what exp makes; the frozen tensor is the model's
  EXPECT_TRUE(report.never_hit.empty());
  const int other = 0;
  EXPECT_THROW(engine.attach({.identity = &other, .units = {{"first", &first, 0}}, .parameters_and_buffers = {}}),
               UserError);
}

}  // namespace
}  // namespace neap::offload::testing
