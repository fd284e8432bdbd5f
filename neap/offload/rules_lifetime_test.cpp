// Rules 9 to 15: repeated, several, abandoned and failed passes; equal numbers; honest reports.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>
#include <thread>

#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "neap/device/device.h"
#include "neap/offload/test_support.h"
#include "testing/error_of.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;

constexpr int64_t kUnits = 4;

class Lifetime : public OffloadTest {};

Options everything() { return all_sizes({.prefetch = Layers{1}, .keep_last = 0, .max_in_flight = 0_B}); }

TEST_F(Lifetime, Rule9_AnInPlaceChangeAfterSavingRaisesWhatEagerAutogradRaises) {
  const at::Tensor w = weight({8, 16}), x = draw({8, 16});
  const auto run = [&](bool offload, int64_t keep_last) {
    FunctionUnits model({[&](const at::Tensor& in) { return at::tanh(in * w); }});
    Engine engine(all_sizes({.keep_last = static_cast<int>(keep_last)}));
    if (offload) engine.attach(model);
    at::Tensor out = model.run(0, x);
    synchronize();  // else the change and our copy of what was there race; what was copied is not used, but it is
                    // reported
    out.add_(1);
    return neap::testing::error_of<c10::Error>([&] { out.sum().backward(); });
  };
  const std::string eager = run(false, 0);
  EXPECT_THAT(eager, ::testing::HasSubstr("modified by an inplace operation"));
  for (const int64_t keep_last : {0, 1}) {
    const std::string ours = run(true, keep_last);
    EXPECT_THAT(ours, ::testing::HasSubstr("modified by an inplace operation"));
    EXPECT_THAT(ours, ::testing::HasSubstr("[8, 16]"));
    EXPECT_THAT(ours, ::testing::HasSubstr("is at version 1; expected version 0"));
  }
}

TEST_F(Lifetime, Rule10_ARetainedGraphRunsAgainAndAgain) {
  Chain chain(kUnits);
  chain.loss().backward();
  Tensors once;
  for (const at::Tensor& w : chain.weights) {
    once.push_back(w.grad().clone());
    w.mutable_grad().reset();
  }
  Engine engine(everything());
  engine.attach(*chain.model);
  const at::Tensor loss = chain.loss();
  for (int pass = 0; pass < 3; ++pass) {
    loss.backward({}, /*retain_graph=*/true);
    for (size_t i = 0; i < once.size(); ++i) {
      EXPECT_TRUE(bit_equal(chain.weights[i].grad(), once[i])) << "pass " << pass << ", weight " << i;
      chain.weights[i].mutable_grad().reset();
    }
  }
}

TEST_F(Lifetime, Rule10_ARetainedGraphHoldsNoDeviceMemoryBetweenItsPasses) {
  Chain chain(kUnits);
  Engine engine(everything());
  engine.attach(*chain.model);
  const at::Tensor loss = chain.loss();
  const int64_t before = live_bytes();
  loss.backward({}, /*retain_graph=*/true);
  for (const at::Tensor& w : chain.weights) w.mutable_grad().reset();
  EXPECT_EQ(live_bytes(), before);
}

TEST_F(Lifetime, Rule10_DoubleBackwardGivesTheSameSecondDerivatives) {
  Chain chain(kUnits);
  const auto second = [&] {
    const at::Tensor x = chain.input.clone().set_requires_grad(true);
    const at::Tensor loss = chain.model->forward(x).pow(2).sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    const auto again = torch::autograd::grad({first[0].pow(2).sum()}, {x, chain.weights[0]});
    return Tensors{again[0].cpu(), again[1].cpu()};
  };
  const Tensors expected = second();
  Engine engine(everything());
  engine.attach(*chain.model);
  EXPECT_TRUE(bit_equal(second(), expected));
}

TEST_F(Lifetime, Rule11_SeveralPassesBeforeBackwardKeepSeparateTapes) {
  Chain chain(kUnits);
  const auto run = [&] {
    const at::Tensor a = chain.model->forward(chain.input).sum(), b = chain.model->forward(chain.input * 2).sum();
    b.backward();
    a.backward();
    Tensors grads;
    for (const at::Tensor& w : chain.weights) {
      grads.push_back(w.grad().cpu());
      w.mutable_grad().reset();
    }
    return grads;
  };
  const Tensors expected = run();
  Engine engine(everything());
  engine.attach(*chain.model);
  EXPECT_TRUE(bit_equal(run(), expected));
  EXPECT_EQ(engine.take_step_report().passes, 2);
}

TEST_F(Lifetime, Rule12_NoGradLeavesNoTrace) {
  Chain chain(kUnits);
  Engine engine(everything());
  engine.attach(*chain.model);
  {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) chain.loss();
  }
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.saved_tensors, 0);
  EXPECT_EQ(report.passes, 0);
  EXPECT_EQ(engine.host_counters().acquires, 0);
}

TEST_F(Lifetime, Rule12_DroppedGraphsAndUnusedUnitsReleaseEverything) {
  Chain chain(kUnits);
  Engine engine(everything());
  engine.attach(*chain.model);
  const int64_t before = live_bytes();
  { const at::Tensor dropped = chain.loss(); }
  const at::Tensor unused = chain.model->run(3, chain.input);
  chain.model->run(0, chain.input).sum().backward();
  chain.weights[0].mutable_grad().reset();
  EXPECT_EQ(live_bytes(), before + Chain::kBytes);  // `unused` itself
  synchronize();
  EXPECT_LE(engine.host_counters().requested, Bytes(2 * Chain::kBytes));
}

TEST_F(Lifetime, Rule12_FrozenUnitsBeforeTheFirstTrainedOneSaveNothing) {
  Chain chain(kUnits);
  for (size_t i = 0; i + 1 < chain.weights.size(); ++i) chain.weights[i].set_requires_grad(false);
  Engine engine(everything());
  engine.attach(*chain.model);
  chain.loss().backward();
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.saved_bytes, Bytes(2 * Chain::kBytes));
  EXPECT_EQ(report.never_hit.size(), kUnits - 1);
}

// ---- rule 13: after any exception the next step is a fresh engine's, and all bytes are back.
class Failing : public OffloadTest {
 protected:
  // Made here and not as a member: what it allocates is gone before the fixture looks at what is left.
  void run(const std::function<void(Chain&)>& fail) {
    Chain chain(kUnits);
    const Tensors expected = chain.step();
    Engine engine(everything());
    engine.attach(*chain.model);
    chain.step();
    const int64_t before = live_bytes();
    fail(chain);
    for (const at::Tensor& w : chain.weights) w.mutable_grad().reset();
    synchronize();
    EXPECT_EQ(live_bytes(), before);
    EXPECT_EQ(engine.host_counters().requested, 0_B);
    EXPECT_TRUE(bit_equal(chain.step(), expected));
    EXPECT_EQ(live_bytes(), before);
  }
};

TEST_F(Failing, Rule13_ACopyThatFailsOnItsWayOutOrIn) {
  auto& device = device::Device::of(c10::Device(kSim, 0));
  for (const auto direction : {device::Direction::kOut, device::Direction::kIn}) {
    for (int which = 0; which < 4; ++which) {
      run([&](Chain& chain) {
        int left = which;
        device.set_copy_hook([&](const device::Copy& copy) {
          if (copy.direction == direction && left-- == 0) throw std::runtime_error("copy failed");
        });
        EXPECT_THAT(neap::testing::error_of<std::exception>([&] { chain.step(); }),
                    ::testing::HasSubstr("copy failed"));
        device.set_copy_hook({});
      });
    }
  }
}

TEST_F(Failing, Rule13_AForwardThatFails) {
  run([](Chain& chain) {
    chain.model->run(0, chain.input);
    EXPECT_THROW(chain.model->run(1, at::ones({3, 3}, on_sim())), c10::Error);
  });
}

TEST_F(Failing, Rule13_ABackwardThatFails) {
  run([](Chain& chain) {
    at::Tensor hidden = chain.input;
    for (size_t i = 0; i < kUnits; ++i) {
      hidden = chain.model->run(i, hidden);
      if (i == 1) {
        hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook failed"); });
      }
    }
    const at::Tensor loss = hidden.sum();
    hidden.reset();
    EXPECT_THAT(neap::testing::error_of<std::exception>([&] { loss.backward(); }), ::testing::HasSubstr("hook failed"));
  });
}

TEST_F(Lifetime, Rule13_APolicyThatThrows) {
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  int calls = 0;
  Options options = everything();
  options.policy = [&](const at::Tensor&, std::string_view, std::string_view) {
    if (++calls == 4) throw std::runtime_error("policy failed");
    return Decision::kOffload;
  };
  Engine engine(std::move(options));
  engine.attach(*chain.model);
  EXPECT_THAT(neap::testing::error_of<std::exception>([&] { chain.loss(); }), ::testing::HasSubstr("policy failed"));
  EXPECT_TRUE(bit_equal(chain.step(), expected));
}

TEST_F(Lifetime, Rule13_AtTheHostLimitStoragesStayOnTheDevice) {
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  std::vector<std::string> warnings;
  LogSink former = set_log_sink([&](LogLevel, const std::string& text) { warnings.push_back(text); });
  const ScopeExit restore([&] { set_log_sink(std::move(former)); });
  for (const Bytes limit : {0_B, Bytes(2 * Chain::kBytes)}) {
    Options options = everything();
    options.host_limit = limit;
    Engine engine(std::move(options));
    engine.attach(*chain.model);
    warnings.clear();
    for (int step = 0; step < 3; ++step) {
      EXPECT_TRUE(bit_equal(chain.step(), expected));
      EXPECT_LE(engine.take_step_report().offloaded_bytes, limit);
    }
    EXPECT_THAT(warnings, ::testing::ElementsAre(::testing::HasSubstr("[offload.host_limit]"))) << "once is enough";
  }
}

TEST_F(Lifetime, Rule13_AnEngineMayGoBeforeTheGraphsItMade) {
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  at::Tensor loss;
  {
    Engine engine(everything());
    engine.attach(*chain.model);
    loss = chain.loss();
  }
  loss.backward();
  EXPECT_TRUE(bit_equal(chain.weights[0].grad().cpu(), expected[1]));
}

TEST_F(Lifetime, Rule13_TwoModelsInterleavedAreIndependent) {
  Chain a(kUnits), b(kUnits);
  const Tensors expected = a.step();
  Engine first(everything()), second(everything());
  first.attach(*a.model);
  second.attach(*b.model);
  const at::Tensor loss_a = a.loss(), loss_b = b.loss();
  first.detach();
  loss_a.backward();
  loss_b.backward();
  EXPECT_TRUE(bit_equal(a.weights[1].grad().cpu(), expected[2]));
  EXPECT_TRUE(bit_equal(b.weights[1].grad().cpu(), expected[2]));
  EXPECT_EQ(first.take_step_report().passes, 1);
  EXPECT_EQ(second.take_step_report().passes, 1);
}

TEST_F(Lifetime, Rule15_TheReportTellsOfUnitsThatSavedNothing) {
  Chain chain(kUnits);
  Engine engine(everything());
  engine.attach(*chain.model);
  chain.model->run(1, chain.input).sum().backward();
  EXPECT_THAT(engine.take_step_report().never_hit, ::testing::ElementsAre("layers.0", "layers.2", "layers.3"));
}

TEST_F(Lifetime, Rule15_TheReportTellsOfMemoryThatOthersHold) {
  Chain chain(kUnits);
  Engine engine(everything());
  engine.attach(*chain.model);
  const at::Tensor held = chain.model->run(0, chain.input);
  at::Tensor x = held;
  for (size_t i = 1; i < kUnits; ++i) x = chain.model->run(i, x);
  const at::Tensor loss = x.sum();
  x.reset();
  loss.backward();
  const StepReport report = engine.take_step_report();
  // The caller's input and the output it kept; both were saved by the first unit.
  ASSERT_EQ(report.still_referenced.size(), 1);
  EXPECT_EQ(report.still_referenced[0].unit, "layers.0");
  EXPECT_EQ(report.still_referenced[0].bytes, Bytes(2 * Chain::kBytes));
  EXPECT_EQ(report.planned_drop - report.measured_drop, Bytes(2 * Chain::kBytes));
}

}  // namespace
}  // namespace neap::offload
