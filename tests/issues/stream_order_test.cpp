// Copies that nobody waited for. Megatron-LM 7398 (reload without an edge on its own copy out), torchtune 1867 and pull
// 1936 (device memory given back while still used), torchtitan pull 2581 (a pool slot overwritten while a slow reload
// of the step before still reads it), pytorch pull 70218 and issue 130785 (host memory reused while its copy is
// queued). The hazard checker reports every such program, also when the copies happened to be fast enough.
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

struct Traffic {
  const char* name;
  double d2h, h2d;  // GB/s, 0: memcpy speed
  Bytes max_in_flight;
};

class StreamOrder : public IssueTest, public ::testing::WithParamInterface<Traffic> {
 protected:
  void SetUp() override {
    IssueTest::SetUp();
    throttle_copies(GetParam().d2h, GetParam().h2d);
  }
  static offload::Options options() {
    auto options = everything_leaves();
    options.max_in_flight = GetParam().max_in_flight;
    return options;
  }
};

TEST_P(StreamOrder, BackwardRightAfterForwardOfOneLayer) {
  const auto w = weight({256, 256}, 0.1), x = weight({128, 256});
  FunctionUnits model({[&](const at::Tensor& in) { return at::linear(in, w).tanh().pow(3); }});
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto plain = differentiate(loss, {w, x});
  offload::Engine engine(options());
  engine.attach(model, {"layers.0"});
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(bit_equal(differentiate(loss, {w, x}), plain)) << step;
}

TEST_P(StreamOrder, MaskedIndexingForSeveralSteps) {
  const auto w = weight({64, 64}, 0.1), x = weight({32, 64});
  const auto mask = (at::arange(32 * 64).remainder(3) != 0).view({32, 64}).to(sim());
  const FunctionUnits::Body body = [&](const at::Tensor& in) {
    const auto h = at::linear(in, w);
    const auto picked = at::index(h, {mask}).exp();
    return h.tanh() + picked.mean();
  };
  FunctionUnits model({body, body, body});
  const auto loss = [&] { return model.forward(x).pow(2).mean(); };
  const auto plain = differentiate(loss, {w, x});
  auto one_ahead = options();
  one_ahead.prefetch = offload::Layers{1};
  offload::Engine engine(one_ahead);
  engine.attach(model);
  for (int step = 0; step < 4; ++step) {
    const auto with = differentiate(loss, {w, x});
    EXPECT_TRUE(bit_equal(with, plain)) << step;
    EXPECT_TRUE(with[0].isfinite().item<bool>());
  }
}

TEST_P(StreamOrder, HostMemorySmallerThanAStepIsReusedOnlyAfterItsCopies) {
  const auto make = [] { return std::make_shared<RotaryDecoder>(RotaryDecoder::Shape{.layers = 6}, sim()); };
  const auto plain = train_on_sim<RotaryDecoder>(make, 4, {});
  memory::HostPool::Options pool;
  pool.slab_size = Bytes(16 << 10);
  pool.cache_limit = Bytes(0);
  pool.device = sim();
  const auto with = train_on_sim<RotaryDecoder>(
      make, 4, {.options = options(), .resources = {.pool = std::make_shared<memory::HostPool>(pool)}});
  EXPECT_TRUE(bit_equal(plain, with));
}

TEST_P(StreamOrder, AGraphDroppedWhileItsCopiesRunLeavesNoTrace) {
  const auto w = weight({256, 256}, 0.1), x = weight({128, 256});
  const FunctionUnits::Body body = [&](const at::Tensor& in) { return at::linear(in, w).tanh(); };
  FunctionUnits model({body, body, body});
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto plain = differentiate(loss, {w, x});
  offload::Engine engine(options());
  engine.attach(model);
  const int64_t before = live_bytes();
  for (int step = 0; step < 3; ++step) {
    loss();
    EXPECT_TRUE(bit_equal(differentiate(loss, {w, x}), plain)) << step;
    synchronize();
    EXPECT_EQ(live_bytes(), before);
  }
}

INSTANTIATE_TEST_SUITE_P(Links, StreamOrder,
                         ::testing::Values(Traffic{"Unthrottled", 0, 0, Bytes(0)},
                                           Traffic{"SlowOut", 0.01, 25, Bytes(0)},
                                           Traffic{"SlowIn", 25, 0.01, Bytes(0)},
                                           Traffic{"BothSlow", 0.02, 0.02, Bytes(0)},
                                           Traffic{"SlowOutAndSomeInFlight", 0.01, 25, Bytes(96 << 10)},
                                           Traffic{"BothSlowAndAllInFlight", 0.02, 0.02, Bytes(int64_t{1} << 30)}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace neap::testing
