// Which units, and how much. VeOmni pulls 965 and 872 (prefetch over gaps, globs that reach into layers, keywords not
// offloaded), torchtitan 4636 (limit 0 taken for unlimited), OneTrainer 1136 and Megatron-LM 7090 (options that do
// nothing without a word), TRL 7193 (less saving in synchronous mode), accelerate 4175 (the peak lies elsewhere),
// pytorch 150517 (page-locked memory doubled), pytorch 186161 (host allocations on the hot path), pytorch 147168 (the
// peak depends on how far the host runs ahead), Megatron-LM 6885 (allocations on one-shot streams).
#include "neap/base/error.h"
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class UnitsAndLimits : public IssueTest {
 protected:
  static std::shared_ptr<RotaryDecoder> decoder(RotaryDecoder::Shape shape = {.layers = 6}) {
    return std::make_shared<RotaryDecoder>(shape, sim());
  }
};

TEST_F(UnitsAndLimits, LayersWithGapsAndUnequalCountsOfTensors) {
  const auto w = weight({32, 32}, 0.2), x = weight({16, 32});
  std::vector<FunctionUnits::Body> bodies;
  for (int i = 0; i < 6; ++i)
    bodies.push_back([&, i](const at::Tensor& in) {
      auto y = at::linear(in, w);
      for (int repeat = 0; repeat < i; ++repeat) y = y.tanh() * in;
      return y;
    });
  FunctionUnits model(bodies);
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto plain = differentiate(loss, {w, x});
  for (const int layers : {0, 1, 2}) {
    auto options = everything_leaves();
    options.prefetch = offload::Layers{layers};
    offload::Engine engine(options);
    engine.attach(model, {"0", "2", "5"});
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(bit_equal(differentiate(loss, {w, x}), plain)) << layers;
    EXPECT_THAT(engine.unit_names(), ::testing::ElementsAre("layers.0", "layers.2", "layers.5"));
  }
}

TEST_F(UnitsAndLimits, PatternsAreSegmentAwareAndFailClosed) {
  const auto model = decoder();
  offload::Engine engine(everything_leaves());
  EXPECT_THROW(engine.attach(*model, {"layers.*.attention"}), UserError);
  EXPECT_THROW(engine.attach(*model, {"layers.{*}", "layer.0"}), UserError);
  EXPECT_TRUE(engine.unit_names().empty());
  engine.attach(*model, {"layers.*"});
  EXPECT_EQ(engine.unit_names().size(), 6U);
}

TEST_F(UnitsAndLimits, AHostLimitOfZeroMovesNothing) {
  const auto plain = train_on_sim<RotaryDecoder>([] { return decoder(); }, 2, {});
  auto options = everything_leaves();
  options.host_limit = Bytes(0);
  offload::StepReport report;
  const auto with = train_on_sim<RotaryDecoder>([] { return decoder(); }, 2, {.options = options}, &report);
  EXPECT_TRUE(bit_equal(plain, with));
  EXPECT_EQ(report.offloaded_bytes, Bytes(0));
  EXPECT_EQ(report.host_locked, Bytes(0));
}

TEST_F(UnitsAndLimits, IdleHostMemoryNeverExceedsItsLimitAndALimitOfZeroKeepsNone) {
  const auto plain = train_on_sim<RotaryDecoder>([] { return decoder(); }, 5, {});
  for (const Bytes limit : {Bytes(0), Bytes(int64_t{1} << 30)}) {
    auto options = everything_leaves();
    options.host_cache_limit = limit;
    const auto model = decoder();
    offload::Engine engine(options);
    engine.attach(*model);
    int64_t slabs = 0;
    const auto with = train(
        *model, [&](int64_t step) { return model->loss(step); }, 5,
        [&](int64_t step) {
          synchronize();
          const auto host = engine.host_counters();
          EXPECT_EQ(host.in_use, Bytes(0));
          EXPECT_LE(host.idle, limit);
          if (limit == Bytes(0)) {
            EXPECT_EQ(host.locked, Bytes(0));
            EXPECT_GT(host.slab_allocations, slabs) << "nothing was kept, so each step asks anew";
          } else {
            EXPECT_GT(host.idle, Bytes(0));
            if (step > 0) {
              EXPECT_EQ(host.slab_allocations, slabs);
            }
          }
          slabs = host.slab_allocations;
        });
    EXPECT_TRUE(bit_equal(plain, with));
  }
}

TEST_F(UnitsAndLimits, ADeviceBudgetOfZeroLetsNothingStayAndALargeOneEverything) {
  auto options = everything_leaves();
  offload::StepReport none, all;
  train_on_sim<RotaryDecoder>([] { return decoder(); }, 3, {.options = options}, &none);
  EXPECT_EQ(none.offloaded_bytes, none.saved_bytes);
  options.device_budget = Bytes(int64_t{1} << 30);
  train_on_sim<RotaryDecoder>([] { return decoder(); }, 3, {.options = options}, &all);
  EXPECT_EQ(all.offloaded_bytes, Bytes(0));
}

TEST_F(UnitsAndLimits, SynchronousModeSavesAsMuch) {
  auto options = everything_leaves();
  offload::StepReport async, sync;
  const auto a = train_on_sim<RotaryDecoder>([] { return decoder(); }, 3, {.options = options}, &async);
  options.mode = offload::Mode::kSync;
  const auto s = train_on_sim<RotaryDecoder>([] { return decoder(); }, 3, {.options = options}, &sync);
  EXPECT_TRUE(bit_equal(a, s));
  EXPECT_EQ(async.offloaded_bytes, sync.offloaded_bytes);
  EXPECT_EQ(async.planned_drop, sync.planned_drop);
  EXPECT_GE(sync.ratio(), 0.95);
}

TEST_F(UnitsAndLimits, UnitsThatNeverRanAreReported) {
  const auto w = weight({16, 16}), x = weight({8, 16});
  const FunctionUnits::Body body = [&](const at::Tensor& in) { return at::linear(in, w).tanh(); };
  FunctionUnits model({body, body, body});
  offload::Engine engine(everything_leaves());
  engine.attach(model);
  model.run(2, model.run(0, x)).sum().backward();
  const auto report = engine.take_step_report();
  EXPECT_THAT(report.never_hit, ::testing::ElementsAre("layers.1"));
  EXPECT_FALSE(report.findings().empty());
  w.mutable_grad().reset(), x.mutable_grad().reset();
}

TEST_F(UnitsAndLimits, APeakThatLiesElsewhereIsSaidSo) {
  const auto w = weight({64, 64}, 0.1), x = weight({32, 64});
  const FunctionUnits::Body body = [&](const at::Tensor& in) { return at::linear(in, w).tanh(); };
  FunctionUnits model({body, body, body});
  offload::Engine engine(everything_leaves());
  engine.attach(model);
  offload::StepReport report;
  for (int i = 0; i < 2; ++i) {
    control().reset_peak(0);
    const auto head = at::matmul(model.forward(x), at::ones({64, 8192}, on_sim()));  // far larger than the units
    head.logsumexp(-1).sum().backward();
    report = engine.take_step_report();
  }
  EXPECT_EQ(report.peak_piece, "after the forward of layers.2") << to_string(report);
  EXPECT_EQ(report.away_at_peak, report.planned_drop);  // all that could leave had left
  EXPECT_THAT(to_string(report), HasSubstr("reached after the forward of layers.2 with 24.00 KiB away"));
  w.mutable_grad().reset(), x.mutable_grad().reset();
}

TEST_F(UnitsAndLimits, PageLockedMemoryIsNotDoubled) {
  memory::HostPool::Options options;
  options.device = sim();
  memory::HostPool pool(options);
  const Bytes asked(int64_t{129} << 20);
  const auto buffer = pool.acquire(asked);
  EXPECT_LE(pool.counters().locked.count, asked.count * 102 / 100);
}

TEST_F(UnitsAndLimits, NoHostAllocationAfterTheThirdStep) {
  int64_t third = 0, last = 0;
  train_on_sim<RotaryDecoder>([] { return decoder(); }, 8,
                              {.options = everything_leaves(), .after_step = [&](int64_t step) {
                                 last = control().pinned_memory().allocations;
                                 if (step == 2) third = last;
                               }});
  EXPECT_GT(third, 0);
  EXPECT_EQ(last, third);
}

TEST_F(UnitsAndLimits, ThePeakIsTheSameHoweverFarTheHostRunsAhead) {
  const auto peak_with = [&](double launch_ns) {
    configure([&](sim::DeviceConfig& config) {
      config.launch_ns = launch_ns, config.event_ns = launch_ns / 4;
      config.d2h_gbps = config.h2d_gbps = 1;
    });
    int64_t peak = 0;
    auto options = everything_leaves();
    options.prefetch = offload::Layers{1};
    train_on_sim<RotaryDecoder>([] { return decoder(); }, 4, {.options = options, .after_step = [&](int64_t) {
                                                                peak = control().memory(0).requested_peak;
                                                                control().reset_peak(0);
                                                              }});
    return peak;
  };
  EXPECT_EQ(peak_with(0), peak_with(20'000));
}

}  // namespace
}  // namespace neap::testing
