// On an accelerator: its generator, its streams and threads, and the bytes that recomputation is for.
#include <ATen/autocast_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/recompute/recompute.h"
#include "neap/recompute/test_support.h"
#include "testing/sim_fixture.h"
#include "testing/small_models.h"

namespace neap::recompute::testing {
namespace {

using neap::testing::FunctionUnits;
using neap::testing::kSim;
using neap::testing::on_sim;
using neap::testing::sim;

class RecomputeSim : public neap::testing::SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    baseline = live_bytes();
  }
  int64_t baseline = 0;
};

TEST_F(RecomputeSim, TheDevicesGeneratorIsPutBackAsTheCpusIs) {
  for (const Way way : {Way::kRegions, Way::kNested}) {
    Net net(sim());
    const auto plain = net.gradients_of(net.loss(Way::kPlain));
    const auto next = at::rand({4}, on_sim()).cpu();
    EXPECT_TRUE(bit_equal(net.gradients_of(net.loss(way)), plain));
    EXPECT_TRUE(bit_equal(at::rand({4}, on_sim()).cpu(), next));
    EXPECT_FALSE(bit_equal(net.gradients_of(net.loss(way, {{.preserve_rng = false}})), plain));
  }
  EXPECT_EQ(live_bytes(), baseline);
}

TEST_F(RecomputeSim, AGeneratorThatNoInputTellsOfHasToBeNamed) {
  const auto run = [&](const RegionOptions& options) {
    const Tensor w = at::ones({4}, on_sim()).set_requires_grad(true);
    const Tensor y = region_of([w](const Tensor& in) { return at::dropout(in.to(sim()) * w, 0.5, true).exp(); },
                               at::ones({4}), options);
    y.sum().backward();
  };
  EXPECT_THAT(error_of([&] { run({}); }), HasSubstr("found one of sim:0, whose random numbers could not be repeated"));
  EXPECT_EQ(error_of([&] { run({{.debug = true}, "region", {sim()}}); }), "no error");
  EXPECT_EQ(error_of([&] { run({{.preserve_rng = false}}); }), "no error");
}

TEST_F(RecomputeSim, AUnitKnowsTheDevicesOfItsModelsParameters) {
  const Tensor w = at::ones({4}, on_sim()).set_requires_grad(true);
  FunctionUnits model({[w](const Tensor& in) { return at::dropout(in.to(sim()) * w, 0.5, true).exp(); }}, {w});
  Recompute recompute({.debug = true});
  recompute.attach(model);
  model.forward(at::ones({4})).sum().backward();
  EXPECT_EQ(recompute.take_step_report().reruns, 1);
}

TEST_F(RecomputeSim, AutocastOfTheDeviceIsFoundAgain) {
  Net net(sim());
  const auto in_bf16 = [&](Way way) {
    Tensor loss;
    {
      at::autocast::set_autocast_enabled(kSim, true);
      at::autocast::set_autocast_dtype(kSim, at::kBFloat16);
      at::autocast::increment_nesting();
      const ScopeExit leave([] {
        if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(kSim, false);
      });
      loss = net.loss(way);
    }
    return net.gradients_of(loss);
  };
  const auto plain = in_bf16(Way::kPlain);
  EXPECT_TRUE(bit_equal(in_bf16(Way::kRegions), plain));
  EXPECT_TRUE(bit_equal(in_bf16(Way::kNested), plain));
}

TEST_F(RecomputeSim, TheSecondRunIsOnTheStreamsOfTheFirst) {
  Net net(sim());
  const auto plain = net.gradients_of(net.loss(Way::kPlain));
  synchronize();
  const c10::impl::VirtualGuardImpl guard(kSim);
  const c10::Stream side = guard.getNewStream(sim());
  std::vector<c10::Stream> streams;
  Tensor loss;
  {
    const c10::StreamGuard on_side(side);
    at::manual_seed(9);
    Tensor h = net.x;
    for (Block& block : net.blocks) {
      h = region_of(
          [&](const Tensor& in) {
            streams.push_back(guard.getStream(sim()));
            return block.forward(in);
          },
          h);
    }
    loss = h.pow(2).mean();
  }
  loss.backward();  // from the default stream; the hazard checker watches
  EXPECT_TRUE(bit_equal(net.gradients(), plain));
  EXPECT_EQ(streams.size(), 6U);
  EXPECT_EQ(std::count(streams.begin(), streams.end(), side), 6);
}

TEST_F(RecomputeSim, TwoDevicesThreadsShareARegion) {
  const auto run = [&](bool recomputed) {
    at::manual_seed(5);
    const Tensor w = at::ones({4}, on_sim(0)).set_requires_grad(true);
    const Tensor v = at::ones({4}, on_sim(1)).set_requires_grad(true);
    const auto body = [w, v](Inputs in) -> TensorList {
      const Tensor a = at::dropout((in[0] * w).exp(), 0.3, true);
      const Tensor b = at::dropout((in[1] * v).exp(), 0.3, true);
      return {a.sin() * a, b.sin() * b};
    };
    const Tensor x = at::full({4}, 0.5, on_sim(0)), y = at::full({4}, 0.25, on_sim(1));
    const auto out = recomputed ? region(body, {x, y}) : body({x, y});
    // Both gradients arrive at once, each on the thread of its device.
    (out[0].sum().cpu() + out[1].sum().cpu()).backward();
    return TensorList{w.grad().cpu(), v.grad().cpu()};
  };
  const auto plain = run(false);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(bit_equal(run(true), plain));
}

// Layers of one wide activation each.
class Memory : public RecomputeSim {
 protected:
  static constexpr int kLayers = 8;
  static constexpr int64_t kRows = 64, kWidth = 32, kWide = 512;
  static constexpr int64_t kNarrowBytes = kRows * kWidth * 4, kWideBytes = kRows * kWide * 4;

  void SetUp() override {
    RecomputeSim::SetUp();
    up = (at::randn({kWide, kWidth}) * 0.1).to(sim()).set_requires_grad(true);
    down = (at::randn({kWidth, kWide}) * 0.1).to(sim()).set_requires_grad(true);
    const FunctionUnits::Body body = [this](const Tensor& in) {
      return in + at::linear(at::linear(in, up).tanh(), down);
    };
    model = std::make_shared<FunctionUnits>(std::vector<FunctionUnits::Body>(kLayers, body), TensorList{up, down});
    x = at::randn({kRows, kWidth}).to(sim());
    step();  // gradients exist from now on
  }
  void TearDown() override {
    model.reset();
    up = down = x = Tensor();
    RecomputeSim::TearDown();
  }
  // The most bytes that are alive in forward and in the whole step, beyond those before it.
  struct Peaks {
    int64_t after_forward, step;
  };
  Peaks step() {
    synchronize();
    const int64_t before = live_bytes();
    control().reset_peak(0);
    Tensor loss = model->forward(x).pow(2).sum();
    synchronize();
    const int64_t after_forward = live_bytes() - before;
    loss.backward();
    loss = Tensor();
    synchronize();
    return {after_forward, control().memory(0).requested_peak - before};
  }

  Tensor up, down, x;
  std::shared_ptr<FunctionUnits> model;
};

TEST_F(Memory, OfForwardIsTheInputsOfTheUnits) {
  const Peaks plain = step();
  EXPECT_GE(plain.after_forward, kLayers * (kNarrowBytes + kWideBytes));
  Recompute recompute;
  recompute.attach(*model);
  const int64_t before = live_bytes();
  const Peaks recomputed = step();
  // Each unit's input, the last one's output, which the loss saves, and the loss.
  EXPECT_LE(recomputed.after_forward, (kLayers + 1) * kNarrowBytes + 64);
  EXPECT_EQ(live_bytes(), before);
  EXPECT_EQ(recompute.take_step_report().bytes_not_kept.count, kLayers * kWideBytes);
}

TEST_F(Memory, AtThePeakIsOneUnitsWork) {
  const Peaks plain = step();
  Recompute recompute;
  recompute.attach(*model);
  const Peaks recomputed = step();
  // All but one unit's wide tensors are spared.
  EXPECT_LE(recomputed.step, plain.step - (kLayers - 2) * kWideBytes);
  EXPECT_LT(recomputed.step, plain.step / 2);
}

TEST_F(Memory, IsBackAfterEveryKindOfEnd) {
  Recompute recompute;
  recompute.attach(*model);
  synchronize();
  const int64_t before = live_bytes();
  { const Tensor dropped = model->forward(x); }
  synchronize();
  EXPECT_EQ(live_bytes(), before);
  {
    const Tensor middle = model->run(0, x);
    middle.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("hook failed"); });
    const Tensor loss = model->run(2, model->run(1, middle)).sum();
    EXPECT_THROW(loss.backward(), std::exception);
  }
  step();  // autograd's thread may hold the failed pass until it has the next one
  EXPECT_EQ(live_bytes(), before);
  for (int i = 0; i < 2; ++i) step();
  EXPECT_EQ(live_bytes(), before);
}

TEST_F(Memory, RunningOutInTheSecondRunIsForgotten) {
  const auto gradients = [&] {
    TensorList all = {up.grad().cpu(), down.grad().cpu()};
    return all;
  };
  up.grad().zero_(), down.grad().zero_();
  step();
  const TensorList plain = gradients();
  Recompute recompute;
  recompute.attach(*model);
  synchronize();
  const int64_t before = live_bytes();
  const auto config = control().config();
  int failures = 0;
  for (const int64_t units : {1, 2, 3, 4}) {
    const int64_t spare = (kLayers + 1) * kNarrowBytes + units * kWideBytes / 2;
    configure([&](neap::sim::DeviceConfig& c) { c.capacity = Bytes(control().memory(0).current + spare); });
    try {
      step();
    } catch (const c10::OutOfMemoryError&) {
      ++failures;
    }
    configure([&](neap::sim::DeviceConfig& c) { c = config; });
    step();  // autograd's thread may hold the failed node's inputs until it has the next one
    EXPECT_EQ(live_bytes(), before) << units;
  }
  EXPECT_GT(failures, 0);
  up.grad().zero_(), down.grad().zero_();
  step();
  EXPECT_TRUE(bit_equal(gradients(), plain));
}

}  // namespace
}  // namespace neap::recompute::testing
