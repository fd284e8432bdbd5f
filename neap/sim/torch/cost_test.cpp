// What torch's operators cost on the virtual clock, and which programs the checker reports. The engine's own tests
// cover the clock and the checker; here it is what the torch side tells the engine.
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

using at::Tensor;

class Cost : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    // A device that computes 1 flop or moves 1 byte a nanosecond, and nothing else costs anything.
    configure([](sim::DeviceConfig& config) {
      config.gflops = config.hbm_gbps = 1;
      config.kernel_min_ns = config.launch_ns = config.event_ns = config.latency_ns = 0;
    });
  }
  template <class Function>
  static int64_t busy_ns(Function&& function) {
    const auto before = control().counters(0).kernel_busy_ns;
    const auto kept = function();
    return control().counters(0).kernel_busy_ns - before;
  }
};

TEST_F(Cost, OfProductsIsTheirFloatingPointOperations) {
  const auto a = at::ones({32, 64}, on_sim()), b = at::ones({64, 48}, on_sim()), c = at::ones({32, 48}, on_sim());
  EXPECT_EQ(busy_ns([&] { return a.mm(b); }), 2 * 32 * 64 * 48);
  EXPECT_EQ(busy_ns([&] { return at::addmm(c, a, b); }), 2 * 32 * 64 * 48);
  EXPECT_EQ(busy_ns([&] { return at::linear(a, b.t()); }), 2 * 32 * 64 * 48);
  const auto x = at::ones({3, 32, 64}, on_sim()), y = at::ones({3, 64, 48}, on_sim());
  EXPECT_EQ(busy_ns([&] { return x.bmm(y); }), 3 * 2 * 32 * 64 * 48);
}

TEST_F(Cost, OfConvolutionsIsTheirFloatingPointOperations) {
  const auto image = at::ones({2, 4, 9, 9}, on_sim()), kernel = at::ones({6, 4, 3, 3}, on_sim());
  EXPECT_EQ(busy_ns([&] { return at::conv2d(image, kernel); }), 2 * 2 * 7 * 7 * (6 * 4 * 3 * 3));
  EXPECT_EQ(busy_ns([&] { return at::conv2d(image, kernel, {}, 2, 1); }), 2 * 2 * 5 * 5 * (6 * 4 * 3 * 3));
}

TEST_F(Cost, OfFusedAttentionIsItsTwoProductsAndItsMemoryLacksTheScores) {
  const auto q = at::ones({1, 2, 64, 8}, on_sim());
  control().reset_peak(0);
  const auto before = live_bytes();
  EXPECT_EQ(busy_ns([&] { return at::scaled_dot_product_attention(q, q, q, {}, 0.0, true); }), 4 * 2 * 64 * 64 * 8);
  EXPECT_LT(control().memory(0).requested_peak - before, 2 * 64 * 64 * 4);
}

TEST_F(Cost, OfEverythingElseIsTheBytesItMoves) {
  const auto x = at::ones({1000}, on_sim()), y = at::ones({1000}, on_sim());
  EXPECT_EQ(busy_ns([&] { return x + y; }), 3 * 4000);
  EXPECT_EQ(busy_ns([&] { return Tensor(x).add_(y); }), 3 * 4000);
  EXPECT_EQ(busy_ns([&] { return x.narrow(0, 0, 10).exp(); }), 2 * 40);
  EXPECT_EQ(busy_ns([&] { return at::ones({1}, on_sim()).expand({1000}).add(y); }), 4 + 4 + 2 * 4000);
  // A result that the kernel makes itself counts like one made for it.
  EXPECT_EQ(
      busy_ns([&] {
        return at::embedding_dense_backward(x.view({10, 100}), at::zeros({10}, at::kLong).to(sim()), 3, -1, false);
      }),
      4000 + 80 + 3 * 400);
}

TEST_F(Cost, OfAViewIsNothing) {
  const auto x = at::ones({10, 100}, on_sim());
  const auto kernels = control().counters(0).kernels;
  EXPECT_EQ(busy_ns([&] { return x.t().narrow(0, 3, 5).unfold(0, 2, 1).view(at::kInt); }), 0);
  EXPECT_EQ(control().counters(0).kernels, kernels);
}

TEST_F(Cost, OfACopyIsItsBytesAndItsTimeIsThatOfItsStream) {
  throttle_copies(/*d2h_gbps=*/2, /*h2d_gbps=*/4, /*latency_ns=*/100);
  const c10::impl::VirtualGuardImpl guard(kSim);
  const auto x = at::ones({1000}, on_sim());
  const auto host = at::empty({1000}, pinned());
  c10::Event before(kSim, c10::EventFlag::BACKEND_DEFAULT), out(kSim, c10::EventFlag::BACKEND_DEFAULT),
      in(kSim, c10::EventFlag::BACKEND_DEFAULT);
  const auto stream = guard.getStream(sim());
  before.record(stream);
  host.copy_(x, true);
  out.record(stream);
  x.copy_(host, true);
  in.record(stream);
  in.synchronize();
  EXPECT_DOUBLE_EQ(before.elapsedTime(out), (100 + 4000 / 2) * 1e-6);
  EXPECT_DOUBLE_EQ(out.elapsedTime(in), (100 + 4000 / 4) * 1e-6);
  EXPECT_EQ(control().counters(0).d2h.bytes, 4000);
  EXPECT_EQ(control().counters(0).h2d.bytes, 4000);
}

TEST_F(Cost, AnOperatorWhoseShapeDependsOnDataMakesTheHostWait) {
  const auto x = at::ones({1000}, on_sim());
  const auto host_time = [] { return control().host_time_ns(0); };
  synchronize();
  const auto start = host_time();
  const auto sum = x + x;
  EXPECT_EQ(host_time(), start);  // launched, not waited for
  x.nonzero();
  EXPECT_GE(host_time(), start + 12000);
  const auto later = host_time();
  const auto picked = x.index({at::zeros({4}, at::kLong).to(sim())}) + sum[0];
  const auto waited = control().counters(0).host_waits;
  const auto again = x.index({at::zeros({4}, on_sim().dtype(at::kLong))});
  EXPECT_EQ(control().counters(0).host_waits, waited);  // integer indices give the shape beforehand
  EXPECT_GE(host_time(), later);
}

class Hazards : public SimTest {
 protected:
  // The classical offload of x to the host on a side stream; the event is done with the copy.
  c10::Event offload(const Tensor& x, bool wait_for_producer) {
    c10::Event ready(kSim), done(kSim);
    ready.record(compute_);
    const c10::StreamGuard on(side_);
    if (wait_for_producer) ready.block(side_);
    host_.copy_(x, true);
    done.record(side_);
    return done;
  }
  void SetUp() override {
    SimTest::SetUp();
    host_ = at::empty({1000}, pinned());
  }
  void TearDown() override {
    synchronize();
    host_.reset();
    SimTest::TearDown();
  }

  c10::impl::VirtualGuardImpl guard_{(sim_control(), kSim)};
  c10::Stream compute_ = guard_.getDefaultStream(sim());
  c10::Stream side_ = guard_.getStreamFromGlobalPool(sim());
  Tensor host_;
};

TEST_F(Hazards, ACopyThatDoesNotWaitForItsProducerIsReported) {
  const auto x = at::ones({1000}, on_sim());
  offload(x, /*wait_for_producer=*/false);
  const auto hazards = take_hazards();
  ASSERT_EQ(hazards.size(), 1u);
  EXPECT_THAT(hazards[0], ::testing::HasSubstr("copy d2h"));
  EXPECT_THAT(hazards[0], ::testing::HasSubstr("fill_"));  // both sides are named
  synchronize();
}

TEST_F(Hazards, AKernelThatOverwritesWhatACopyStillReadsIsReported) {
  const auto x = at::ones({1000}, on_sim());
  const auto done = offload(x, true);
  x.add_(1);
  EXPECT_THAT(take_hazards(), ::testing::ElementsAre(::testing::HasSubstr("add")));
  done.synchronize();
  x.add_(1);
}

TEST_F(Hazards, AKernelThatReadsWhatACopyHasNotWrittenIsReported) {
  const auto x = at::empty({1000}, on_sim());
  host_.fill_(1);
  c10::Event ready(kSim), done(kSim);
  ready.record(compute_);
  {
    const c10::StreamGuard on(side_);
    ready.block(side_);
    x.copy_(host_, true);
    done.record(side_);
  }
  const auto wrong = x + 1;
  EXPECT_EQ(take_hazards().size(), 1u);
  done.block(compute_);
  const auto right = x + 1;
  EXPECT_TRUE(take_hazards().empty());
}

TEST_F(Hazards, MemoryFreedUnderAQueuedCopyAndReusedIsReported) {
  auto x = at::ones({1000}, on_sim());
  offload(x, true);
  x.reset();
  EXPECT_TRUE(take_hazards().empty());  // the streams could still be ordered before anybody reuses it
  const auto y = at::empty({1000}, on_sim());
  EXPECT_EQ(take_hazards().size(), 1u);
}

TEST_F(Hazards, AnyWayOfOrderingAFreeIsSilent) {
  {
    auto x = at::ones({1000}, on_sim());
    const auto done = offload(x, true);
    done.synchronize();
  }
  at::empty({1000}, on_sim());
  {
    auto x = at::ones({1000}, on_sim());
    const auto done = offload(x, true);
    done.block(compute_);
  }
  at::empty({1000}, on_sim());
  {
    auto x = at::ones({1000}, on_sim());
    offload(x, true);
    x.record_stream(side_);
  }
  at::empty({1000}, on_sim());
  {
    auto x = at::ones({1000}, on_sim());
    const auto done = offload(x, true);
    while (!done.query()) {
    }
  }
  at::empty({1000}, on_sim());
}

TEST_F(Hazards, AreJudgedByTheBytesTouched) {
  const auto x = at::zeros({1000}, on_sim());
  host_.fill_(1);
  c10::Event ready(kSim);
  ready.record(compute_);
  {
    const c10::StreamGuard on(side_);
    ready.block(side_);
    x.narrow(0, 0, 500).copy_(host_.narrow(0, 0, 500), true);
  }
  x.narrow(0, 500, 500).fill_(2);
  EXPECT_TRUE(take_hazards().empty());
  x.narrow(0, 499, 500).fill_(2);  // one element too many
  EXPECT_EQ(take_hazards().size(), 1u);
}

TEST_F(Hazards, OverPiecesOfAPinnedSlabAreSeen) {
  const auto x = at::ones({100}, on_sim());
  const auto slab = at::empty({4096}, pinned().dtype(at::kByte));
  const auto piece = at::from_blob(slab.data_ptr<uint8_t>() + 512, {100}, at::kFloat);
  const auto other = guard_.getStreamFromGlobalPool(sim());
  c10::Event ready(kSim);
  ready.record(compute_);
  for (const auto& stream : {side_, other}) {
    const c10::StreamGuard on(stream);
    ready.block(stream);
    piece.copy_(x, true);  // twice into the same bytes, from streams that nothing orders
  }
  EXPECT_EQ(take_hazards().size(), 1u);
  synchronize();
}

}  // namespace
}  // namespace neap::testing
