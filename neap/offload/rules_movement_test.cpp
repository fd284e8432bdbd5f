// Rules 4 to 8: when storages leave, when their memory is free, and how they come back.
#include <algorithm>
#include <random>

#include "neap/offload/test_support.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;

class Movement : public OffloadTest {
 protected:
  // Nothing but the units' storages: what autograd saves elsewhere is below the engine.
  static constexpr int64_t kUnits = 6;
};

TEST_F(Movement, Rule4_PackReturnsBeforeTheCopyIsDone) {
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  Engine engine(all_sizes({.keep_last = 0}));
  engine.attach(*chain.model);
  at::Tensor loss;
  {
    auto held = hold_copies(neap::sim::Link::kDeviceToHost);
    loss = chain.loss();  // would not come back if anything waited for a copy
    held.resume();
  }
  loss.backward();
  EXPECT_TRUE(bit_equal(chain.weights[0].grad().cpu(), expected[1]));
}

TEST_F(Movement, Rule4_ACopyReadsWhatWasSavedNotWhatCameLater) {
  throttle_copies(0.01, 0.01);
  const at::Tensor w = weight({64, 64}), x = draw({64, 64});
  const auto body = [&](const at::Tensor& in) {
    at::Tensor out = at::zeros_like(in);
    for (int i = 0; i < 4; ++i)
      out = out + (in + double(i)) * w;  // each factor's memory may be given out again at once
    return out;
  };
  body(x).sum().backward();
  const at::Tensor expected = w.grad().clone();
  w.mutable_grad().reset();
  FunctionUnits model({body});
  Engine engine(all_sizes({.keep_last = 0}));
  engine.attach(model);
  model.run(0, x).sum().backward();
  EXPECT_TRUE(bit_equal(w.grad(), expected));
}

TEST_F(Movement, Rule5_MemoryIsFreeOnceItsCopyIsDone) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.keep_last = 0, .max_in_flight = 0_B}));
  engine.attach(*chain.model);
  const int64_t before = live_bytes();
  const at::Tensor loss = chain.loss();
  // What is left is the loss. (The input is the caller's.)
  EXPECT_LE(live_bytes() - before, 512);
  loss.backward();
  EXPECT_DOUBLE_EQ(engine.take_step_report().ratio(), 1 - 1.0 / (kUnits + 1));  // the caller still has the input
}

TEST_F(Movement, Rule5_InFlightBytesAreBoundedByTheStreamNotByTheHost) {
  throttle_copies(/*d2h_gbps=*/0.05, 25);
  for (const int64_t bound : {0, 1, 3}) {
    Chain chain(kUnits);
    Engine engine(all_sizes({.keep_last = 0, .max_in_flight = Bytes(bound * Chain::kBytes)}));
    engine.attach(*chain.model);
    const int64_t before = live_bytes();
    control().reset_counters(0);
    const at::Tensor loss = chain.loss();
    EXPECT_LE(live_bytes() - before, bound * Chain::kBytes + 512) << bound;
    const auto counters = control().counters(0);
    EXPECT_EQ(counters.host_waits, 0) << "the host waited";
    loss.backward();
  }
}

// The checker would report memory that is given out again before the copy has read it.
TEST_F(Movement, Rule5_MemoryOfADroppedGraphIsFreeAtOnceButBehindItsCopies) {
  throttle_copies(/*d2h_gbps=*/0.001, 25);
  Chain chain(kUnits);
  Engine engine(all_sizes({.keep_last = 0}));
  engine.attach(*chain.model);
  const int64_t before = live_bytes();
  chain.loss();  // dropped at once, all copies still queued
  EXPECT_EQ(live_bytes(), before);
  const at::Tensor others = at::ones({kUnits, Chain::kSide, Chain::kSide}, on_sim());
  EXPECT_EQ(others.sum().item<double>(), kUnits * Chain::kSide * Chain::kSide);
}

TEST_F(Movement, Rule6_AStorageStillOnTheDeviceIsUsedWithoutACopy) {
  throttle_copies(/*d2h_gbps=*/0.001, 25);  // nothing has left when backward comes
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  Engine engine(all_sizes({.keep_last = 0, .max_in_flight = 1_GiB}));
  engine.attach(*chain.model);
  control().reset_counters(0);
  EXPECT_TRUE(bit_equal(chain.step(), expected));
  EXPECT_EQ(counted().h2d.copies, 0);
  EXPECT_EQ(engine.take_step_report().forwarded_unpacks, kUnits + 1);
}

TEST_F(Movement, Rule6_WhatACallerStillHoldsIsForwardedWithoutAReload) {
  const at::Tensor w = weight({32, 32});
  const at::Tensor table = draw({32, 32});
  std::vector<FunctionUnits::Body> bodies(4, [&](const at::Tensor& in) { return in * table + in * w; });
  FunctionUnits model(std::move(bodies));
  Engine engine(all_sizes({.prefetch = Layers{1}, .keep_last = 0, .max_in_flight = 0_B}));
  engine.attach(model);
  const at::Tensor x = weight({32, 32});
  at::Tensor loss = model.forward(x).sum();
  control().reset_counters(0);
  loss.backward();
  const StepReport report = engine.take_step_report();
  // The table and what goes from unit to unit: x itself is a leaf.
  EXPECT_EQ(report.offloaded_bytes, Bytes(4 * bytes_of(table)));
  EXPECT_EQ(report.reloaded_bytes, Bytes(3 * bytes_of(table)));
  EXPECT_GE(report.forwarded_unpacks, 1);
  ASSERT_EQ(report.still_referenced.size(), 1);
  EXPECT_EQ(report.still_referenced[0].unit, "layers.0");
  EXPECT_EQ(report.still_referenced[0].bytes, Bytes(bytes_of(table)));
}

TEST_F(Movement, Rule6_AReloadThatBeginsWhenItIsNeededIsLate) {
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  Engine engine(all_sizes({.prefetch = 0_B, .keep_last = 0, .max_in_flight = 0_B}));
  engine.attach(*chain.model);
  EXPECT_TRUE(bit_equal(chain.step(), expected));
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.late_reloads, report.reloaded_storages);
  EXPECT_GT(report.late_reloads, 0);
}

TEST_F(Movement, Rule7_PrefetchByLayersAndByBytesLeavesOnlyTheFirstReloadLate) {
  for (const Prefetch& prefetch :
       {Prefetch(Layers{1}), Prefetch(Layers{2}), Prefetch(1_B), Prefetch(Bytes(3 * Chain::kBytes))}) {
    Chain chain(kUnits);
    const Tensors expected = chain.step();
    Engine engine(all_sizes({.prefetch = prefetch, .keep_last = 0, .max_in_flight = 0_B}));
    engine.attach(*chain.model);
    EXPECT_TRUE(bit_equal(chain.step(), expected));
    const StepReport report = engine.take_step_report();
    EXPECT_LE(report.late_reloads, 1) << to_string(prefetch);
    EXPECT_GE(report.reloaded_storages, kUnits - 1) << to_string(prefetch);
  }
}

TEST_F(Movement, Rule7_AKeptTailGivesPrefetchItsHeadStart) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.prefetch = Layers{1}, .keep_last = 1, .max_in_flight = 0_B}));
  engine.attach(*chain.model);
  for (int step = 0; step < 3; ++step) {
    chain.step();
    EXPECT_EQ(engine.take_step_report().late_reloads, 0) << step;
  }
}

// Units of 13 µs of compute that save 4 KiB each, against copies of 1.2 µs: on the device's clock offload is free.
TEST_F(Movement, Rule7_ALinkThatSufficesCostsTheComputeStreamNoTime) {
  configure([](sim::DeviceConfig& config) {
    config.d2h_gbps = config.h2d_gbps = 25;
    config.latency_ns = 1'000;
    config.gflops = 10;
    config.launch_ns = config.event_ns = 0;  // the host is not what this is about
  });
  for (const Prefetch& prefetch : {Prefetch(Bytes(2 * Chain::kBytes)), Prefetch(Layers{1})}) {
    Chain chain(12);
    Engine engine(all_sizes({.prefetch = prefetch}));
    engine.attach(*chain.model);
    for (int step = 0; step < 4; ++step) chain.step();
    synchronize();
    engine.take_step_report();
    control().reset_counters(0);
    chain.loss().backward();
    const auto counters = counted();
    EXPECT_LE(counters.stall_ns, counters.kernel_busy_ns / 100) << to_string(prefetch);
    const StepReport report = engine.take_step_report();
    EXPECT_GT(report.offloaded_bytes, Bytes(6 * Chain::kBytes)) << to_string(prefetch);
    EXPECT_EQ(report.late_reloads, 0) << to_string(prefetch);
  }
}

TEST_F(Movement, Rule7_TheFirstReloadOfAPassTeachesNothing) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.keep_last = 0, .max_in_flight = 0_B}));
  engine.attach(*chain.model);
  const Bytes before = engine.take_step_report().prefetch_window;
  for (int step = 0; step < 5; ++step) {
    chain.step();
    const StepReport report = engine.take_step_report();
    EXPECT_EQ(report.late_reloads, 1);
    EXPECT_LE(report.prefetch_window, before);
  }
}

TEST_F(Movement, Rule7_AutomaticPrefetchNarrowsWhenReloadsComeTooEarly) {
  throttle_copies(25, 25);
  Chain chain(kUnits);
  Engine engine(all_sizes());
  engine.attach(*chain.model);
  chain.step();
  const Bytes first = engine.take_step_report().prefetch_window;
  // A budget of nothing and a link much faster than compute: a window of many megabytes cannot be right.
  for (int step = 0; step < 30; ++step) {
    chain.step();
    synchronize();
  }
  EXPECT_LE(engine.take_step_report().prefetch_window, first);
}

TEST_F(Movement, Rule7_AnyOrderOfBackwardGivesRightResults) {
  std::mt19937 shuffle(5);
  for (int round = 0; round < 4; ++round) {
    Chain chain(kUnits);
    const auto gradients = [&](bool offload) {
      Engine engine(all_sizes({.prefetch = Layers{1}, .keep_last = 0, .max_in_flight = 0_B}));
      if (offload) engine.attach(*chain.model);
      // Units that do not depend on each other, so that their backward may run in any order.
      Tensors losses;
      for (size_t i = 0; i < kUnits; ++i) losses.push_back(chain.model->run(i, chain.input).sum());
      std::vector<size_t> order(kUnits);
      for (size_t i = 0; i < kUnits; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), shuffle);
      for (const size_t i : order) losses[i].backward();
      Tensors grads;
      for (const at::Tensor& w : chain.weights) {
        grads.push_back(w.grad().cpu());
        w.mutable_grad().reset();
      }
      return grads;
    };
    EXPECT_TRUE(bit_equal(gradients(true), gradients(false)));
  }
}

TEST_F(Movement, Rule8_TheLastUnitStaysFromTheFirstStepOn) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.prefetch = Layers{1}, .keep_last = 1}));
  engine.attach(*chain.model);
  for (int step = 0; step < 3; ++step) {
    chain.step();
    const StepReport report = engine.take_step_report();
    // All storages but the last unit's two: its input, which the unit before saved first, and its output.
    EXPECT_EQ(report.saved_bytes, Bytes((kUnits + 1) * Chain::kBytes));
    EXPECT_GE(report.offloaded_bytes, Bytes((kUnits - 1) * Chain::kBytes)) << step;
    EXPECT_LE(report.offloaded_bytes, Bytes(kUnits * Chain::kBytes)) << step;
  }
}

TEST_F(Movement, Rule8_APassLongerThanTheLastKeepsItsOwnTailAndLosesNothing) {
  Chain chain(kUnits);
  const Tensors expected = chain.step();
  Engine engine(all_sizes({.prefetch = Layers{1}, .keep_last = 1, .max_in_flight = 0_B}));
  engine.attach(*chain.model);
  for (const size_t units : {2, 6, 3, 6}) {
    at::Tensor x = chain.input;
    for (size_t i = 0; i < units; ++i) x = chain.model->run(i, x);
    x.sum().backward();
    if (units == kUnits) {
      EXPECT_TRUE(bit_equal(chain.weights[0].grad().cpu(), expected[1]));
    }
    for (const at::Tensor& w : chain.weights) w.mutable_grad().reset();
  }
}

TEST_F(Movement, Rule8_ABudgetLetsTheLastBytesStay) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.device_budget = Bytes(3 * Chain::kBytes), .prefetch = Layers{1}, .keep_last = 0}));
  engine.attach(*chain.model);
  for (int step = 0; step < 3; ++step) {
    chain.step();
    const StepReport report = engine.take_step_report();
    EXPECT_EQ(report.offloaded_bytes, Bytes((kUnits + 1 - 3) * Chain::kBytes)) << step;
  }
}

TEST_F(Movement, Rule8_ABudgetForEverythingMovesNothing) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.device_budget = 1_GiB}));
  engine.attach(*chain.model);
  chain.step();
  EXPECT_EQ(engine.take_step_report().offloaded_bytes, 0_B);
  EXPECT_EQ(counted().d2h.copies, 1 + kUnits);  // the results that step() looks at
}

}  // namespace
}  // namespace neap::offload
