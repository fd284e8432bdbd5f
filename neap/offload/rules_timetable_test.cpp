// Rule 7's `automatic`: from the second pass on copies follow a timetable, on the device's own clock.
#include <optional>

#include "neap/autograd/named_hook_points.h"
#include "neap/offload/test_support.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;

// Units x → tanh(x * w) that save 1 MiB each. A kernel takes 105 µs, a copy 43 µs.
class TimetableRule : public OffloadTest {
 protected:
  static constexpr int64_t kUnits = 40;
  static constexpr int64_t kSide = 512;

  void SetUp() override {
    OffloadTest::SetUp();
    configure([](sim::DeviceConfig& config) {
      config.d2h_gbps = config.h2d_gbps = 25;
      config.latency_ns = 1'000;
      config.hbm_gbps = 30;
      config.launch_ns = config.event_ns = 0;  // the host is not what this is about
    });
    at::manual_seed(5);
    for (int64_t i = 0; i < kUnits; ++i) {
      weights_.push_back(weight({kSide}));
      bodies_.emplace_back([w = weights_.back()](const at::Tensor& x) { return at::tanh(x * w); });
    }
    model_ = std::make_unique<FunctionUnits>(bodies_);
    input_ = draw({kSide, kSide});
    synchronize();
  }
  void TearDown() override {
    weights_.clear();
    bodies_.clear();
    model_.reset();
    input_.reset();
    OffloadTest::TearDown();
  }

  struct Step {
    Tensors grads;
    int64_t peak = 0;
    sim::Counters counters;
  };
  Step step(int64_t rows = kSide) {
    synchronize();
    control().reset_peak(0);
    control().reset_counters(0);
    const int64_t before = live_bytes();
    model_->forward(input_.narrow(0, 0, rows)).sum().backward();
    Step result{.grads = {}, .peak = 0, .counters = counted()};
    result.peak = control().memory(0).requested_peak - before;
    for (const at::Tensor& w : weights_) {
      result.grads.push_back(w.grad().cpu());
      w.mutable_grad().reset();
    }
    return result;
  }

  std::vector<FunctionUnits::Body> bodies_;
  Tensors weights_;
  std::unique_ptr<FunctionUnits> model_;
  at::Tensor input_;
};

TEST_F(TimetableRule, Rule7_FromTheSecondPassOnCopiesAreJustInTime) {
  const Step plain = step();
  Engine engine;
  engine.attach(*model_);
  const Step first = step();
  const StepReport learned = engine.take_step_report();
  EXPECT_TRUE(bit_equal(first.grads, plain.grads));
  for (int i = 1; i < 5; ++i) {
    const Step next = step();
    const StepReport report = engine.take_step_report();
    EXPECT_TRUE(bit_equal(next.grads, plain.grads)) << i;
    EXPECT_EQ(report.late_reloads, 0) << i;
    EXPECT_LE(next.counters.stall_ns, next.counters.kernel_busy_ns / 100) << i;
    EXPECT_GT(report.offloaded_bytes, learned.offloaded_bytes) << i;
    EXPECT_LE(report.in_flight_window, 2_MiB) << i;
    EXPECT_LE(report.prefetch_window, 3_MiB) << i;
    // The windows of the first pass are 16 MiB.
    EXPECT_LT(next.peak, first.peak - (8 << 20)) << i;
    EXPECT_LT(next.peak, plain.peak / 4) << i;
  }
}

// Each event that is read takes the host a microsecond, and at the begin of a step the device waits for the host.
TEST_F(TimetableRule, Rule7_WhatAPassHasShownIsReadWhenTheHostIsAhead) {
  const Step plain = step();
  Engine engine;
  engine.attach(*model_);
  for (int i = 0; i < 3; ++i) step();
  for (int i = 0; i < 3; ++i) {
    EXPECT_LE(step().counters.launch_bound_ns, plain.counters.launch_bound_ns + 10'000) << i;
  }
  EXPECT_EQ(engine.take_step_report().late_reloads, 0);
}

TEST_F(TimetableRule, Rule7_AboveTheDeviceLimitNothingComesBackAheadOfItsUse) {
  const Step plain = step();
  const auto limited = [&](Bytes limit) {
    Engine engine({.device_limit = limit});
    engine.attach(*model_);
    for (int i = 0; i < 3; ++i) step();
    engine.take_step_report();
    const Step last = step();
    EXPECT_TRUE(bit_equal(last.grads, plain.grads));
    return std::pair(last.peak, engine.take_step_report());
  };
  const auto [free_peak, with_room] = limited(1_GiB);
  EXPECT_EQ(with_room.late_reloads, 0);
  const auto [least_peak, without] = limited(0_B);
  EXPECT_EQ(without.late_reloads, without.reloaded_storages);
  EXPECT_GT(without.reloaded_storages, kUnits / 2);
  EXPECT_LT(least_peak, free_peak);
  // Being late for lack of room is no reason to begin earlier, nor to keep more.
  EXPECT_LE(without.prefetch_window, 16_MiB);
}

// With a head behind the units, which takes 2 ms each way and saves nothing.
class TimetableRuleWithHead : public TimetableRule {
 protected:
  void SetUp() override {
    TimetableRule::SetUp();
    bodies_.emplace_back([](at::Tensor x) {
      for (int i = 0; i < 20; ++i) x = x.neg();
      return x;
    });
    model_ = std::make_unique<FunctionUnits>(bodies_);
  }
};

TEST_F(TimetableRuleWithHead, Rule7_ReloadsGetAheadWhileTheHeadRunsBackward) {
  const Step plain = step();
  auto units = autograd::select_model_units(*model_, {"0-39"}, "offload");
  ASSERT_EQ(units.after_units.size(), 1);
  Engine with;
  with.attach(units);
  for (int i = 0; i < 4; ++i) step();
  with.take_step_report();
  const Step served = step();
  const StepReport report = with.take_step_report();
  EXPECT_EQ(report.stayed_bytes, 0_MiB);
  EXPECT_EQ(report.late_reloads, 0);
  // Also the last copy out is over before backward begins. The input is the test's own.
  EXPECT_EQ(report.measured_drop, report.saved_bytes - 1_MiB);
  EXPECT_LE(served.counters.stall_ns, served.counters.kernel_busy_ns / 100);
  EXPECT_TRUE(bit_equal(served.grads, plain.grads));
  with.detach();

  // Without it, what is needed first cannot leave.
  Engine without;
  units.after_units.clear();
  without.attach(units);
  for (int i = 0; i < 4; ++i) step();
  without.take_step_report();
  step();
  EXPECT_GT(without.take_step_report().stayed_bytes, 0_MiB);
}

TEST_F(TimetableRuleWithHead, Rule10_AKeptGraphComesByTheHeadTwice) {
  const Step plain = step();
  Engine engine;
  engine.attach(*model_, {"0-39"});
  step(), step(), step();
  const at::Tensor loss = model_->forward(input_).sum();
  engine.take_step_report();
  for (const bool keep : {true, false}) {
    loss.backward({}, keep);
    for (size_t i = 0; i < weights_.size(); ++i) {
      EXPECT_TRUE(bit_equal(weights_[i].grad().cpu(), plain.grads[i])) << i;
      weights_[i].mutable_grad().reset();
    }
    EXPECT_EQ(engine.take_step_report().late_reloads, 0);
  }
}

TEST_F(TimetableRule, Rule7_APassOfAnotherShapeGoesWithout) {
  std::vector<Tensors> plain;
  for (const int64_t rows : {kSide, kSide / 2}) plain.push_back(step(rows).grads);
  Engine engine(all_sizes());
  engine.attach(*model_);
  for (int i = 0; i < 10; ++i) {
    const bool half = i % 3 == 1;  // one of three: the timetable is for another pass, or there is none
    EXPECT_TRUE(bit_equal(step(half ? kSide / 2 : kSide).grads, plain[half ? 1 : 0])) << i;
    EXPECT_EQ(engine.take_step_report().passes, 1) << i;
  }
}

TEST_F(TimetableRule, Rule10_AKeptGraphIsReadTwiceByTheSameTimetable) {
  const Step plain = step();
  Engine engine;
  engine.attach(*model_);
  step(), step();
  engine.take_step_report();
  const at::Tensor loss = model_->forward(input_).sum();
  loss.backward({}, /*keep_graph=*/true);
  Tensors once;
  for (const at::Tensor& w : weights_) once.push_back(w.grad().cpu()), w.mutable_grad().reset();
  loss.backward();
  for (size_t i = 0; i < weights_.size(); ++i) {
    EXPECT_TRUE(bit_equal(once[i], plain.grads[i])) << i;
    EXPECT_TRUE(bit_equal(weights_[i].grad().cpu(), plain.grads[i])) << i;
    weights_[i].mutable_grad().reset();
  }
  // The second time even the tail is away.
  EXPECT_LE(engine.take_step_report().late_reloads, 1);
}

// What is saved once backward has begun has no place in the timetable, which ends with the pass as it was then.
TEST_F(TimetableRule, Rule10_APassMayGoOnAfterItsBackward) {
  Engine engine;
  const auto run = [&](bool goes_on) {
    const Scope scope(engine);
    const at::Tensor y = model_->forward(input_);
    y.sum().backward({}, /*keep_graph=*/goes_on);
    for (int i = 0; goes_on && i < 8; ++i) (y * weights_[0]).sum().backward({}, /*keep_graph=*/true);
    const at::Tensor grad = weights_[0].grad().cpu();
    for (const at::Tensor& w : weights_) w.mutable_grad().reset();
    return grad;
  };
  const at::Tensor expected = run(/*goes_on=*/true);
  for (int i = 0; i < 3; ++i) (void)run(/*goes_on=*/false);
  EXPECT_LT(engine.take_step_report().prefetch_window, 16_MiB) << "there is no timetable";
  EXPECT_TRUE(bit_equal(run(/*goes_on=*/true), expected));
}

// Two micro-batches before their backward: no timetable can be made of times that belong to both.
TEST_F(TimetableRule, Rule11_TwoPassesAtOnceAreRight) {
  Tensors expected;
  {
    (model_->forward(input_).sum() + model_->forward(input_).sum()).backward();
    for (const at::Tensor& w : weights_) expected.push_back(w.grad().cpu()), w.mutable_grad().reset();
  }
  Engine engine;
  engine.attach(*model_);
  step(), step();
  for (int round = 0; round < 3; ++round) {
    (model_->forward(input_).sum() + model_->forward(input_).sum()).backward();
    for (size_t i = 0; i < weights_.size(); ++i) {
      EXPECT_TRUE(bit_equal(weights_[i].grad().cpu(), expected[i])) << i;
      weights_[i].mutable_grad().reset();
    }
  }
}

}  // namespace
}  // namespace neap::offload
