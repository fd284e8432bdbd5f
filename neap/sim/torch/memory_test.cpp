// Device and pinned memory as torch sees them: counted exactly, bounded hard, given back.
#include <ATen/TensorOperators.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cmath>
#include <cstring>

#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

using at::Tensor;

class Memory : public SimTest {
 protected:
  static constexpr int64_t kMiB = 1 << 20;

  static Tensor bytes(int64_t n, int device = 0) { return at::empty({n}, on_sim(device).dtype(at::kByte)); }
  static void limit(int64_t capacity) {
    configure([&](sim::DeviceConfig& config) { config.capacity = Bytes(capacity); });
  }
  template <class Function>
  static std::string out_of_memory(Function&& function) {
    try {
      function();
    } catch (const c10::OutOfMemoryError& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
};

TEST_F(Memory, IsCountedAsAskedAndAsHandedOut) {
  const auto before = control().memory(0);
  const auto t = bytes(1000);
  const auto now = control().memory(0);
  EXPECT_EQ(now.requested - before.requested, 1000);
  EXPECT_EQ(now.current - before.current, 1024);  // in steps of 512
  EXPECT_EQ(now.live_blocks - before.live_blocks, 1);
  EXPECT_EQ(control().memory(1).requested, 0);
  const auto stats = c10::getDeviceAllocator(kSim)->getDeviceStats(0);
  EXPECT_EQ(stats.requested_bytes[0].current, now.requested);
  EXPECT_EQ(stats.allocated_bytes[0].current, now.current);
  EXPECT_EQ(stats.allocation[0].current, now.live_blocks);
}

TEST_F(Memory, OfAKernelsResultIsChargedToTheDevice) {
  const auto x = at::randn({64, 64}, on_sim());
  const auto before = live_bytes();
  const auto [out, mean, rstd] = at::native_layer_norm(x, {64}, {}, {}, 1e-5);  // makes its results itself
  EXPECT_EQ(live_bytes() - before, static_cast<int64_t>(out.nbytes() + mean.nbytes() + rstd.nbytes()));
  EXPECT_GE(control().counters(0).adopted, 3);
}

TEST_F(Memory, RunsOutWithAnErrorThatNamesWhatMatters) {
  limit(4 * kMiB);
  const auto held = bytes(3 * kMiB);
  const auto text = out_of_memory([] { bytes(2 * kMiB); });
  for (const char* part : {"sim:0", "2.00 MiB", "1.00 MiB", "3.00 MiB", "4.00 MiB"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  EXPECT_EQ(c10::getDeviceAllocator(kSim)->getDeviceStats(0).num_ooms, control().memory(0).out_of_memory);
  EXPECT_TRUE(bit_equal(at::ones({8}, on_sim()), at::ones({8})));  // and goes on
}

TEST_F(Memory, RunsOutInEveryWayMemoryIsMade) {
  limit(8 * kMiB);
  const auto quarter = at::ones({kMiB / 2}, on_sim());                         // 2 MiB
  const auto half = at::ones({kMiB}, on_sim());                                // 4 MiB
  EXPECT_NE(out_of_memory([&] { at::cat({half, quarter}); }), "");             // result allocated beforehand
  EXPECT_NE(out_of_memory([&] { at::zeros({kMiB}, on_sim()); }), "");          // factory
  EXPECT_NE(out_of_memory([&] { half.to(at::kDouble); }), "");                 // conversion
  EXPECT_NE(out_of_memory([&] { at::native_dropout(half, 0.5, true); }), "");  // result adopted from the kernel
  auto out = at::empty({0}, on_sim().dtype(at::kLong));
  EXPECT_NE(out_of_memory([&] { at::nonzero_out(out, half); }), "");  // out= grown inside the kernel
  EXPECT_NE(out_of_memory([&] { at::empty({0}, on_sim()).resize_({kMiB}); }), "");
  EXPECT_TRUE(bit_equal(quarter + 1, at::full({kMiB / 2}, 2.0f)));
}

TEST_F(Memory, CapacityIsPerDevice) {
  limit(4 * kMiB);
  const auto a = bytes(4 * kMiB, 0), b = bytes(4 * kMiB, 1);
  EXPECT_NE(out_of_memory([] { bytes(1, 1); }).find("sim:1"), std::string::npos);
  const auto [free, total] = c10::getDeviceAllocator(kSim)->getMemoryInfo(0);
  EXPECT_EQ(free, 0u);
  EXPECT_EQ(total, static_cast<std::size_t>(4 * kMiB));
}

TEST_F(Memory, ReadsAsNaNUntilItIsWritten) {
  const auto fresh = at::empty({1000}, on_sim());
  EXPECT_TRUE(fresh.isnan().all().item<bool>());
  const auto half = at::empty({1000}, on_sim().dtype(at::kBFloat16));
  EXPECT_TRUE(half.isnan().all().item<bool>());
}

TEST_F(Memory, PeakIsThatOfTheStepSinceItsReset) {
  { const auto big = bytes(2 * kMiB); }
  EXPECT_GE(control().memory(0).peak, 2 * kMiB);
  c10::getDeviceAllocator(kSim)->resetPeakStats(0);
  EXPECT_EQ(control().memory(0).peak, control().memory(0).current);
}

TEST_F(Memory, PinnedIsCountedBoundedAndFoundByAddress) {
  configure([](sim::DeviceConfig& config) { config.pinned_capacity = Bytes(kMiB); });
  const auto before = control().pinned_memory();
  auto host = at::empty({kMiB / 2}, pinned().dtype(at::kByte));
  EXPECT_EQ(control().pinned_memory().requested - before.requested, kMiB / 2);
  EXPECT_EQ(at::getHostAllocator(kSim)->get_stats().active_bytes.current, control().pinned_memory().requested);
  EXPECT_TRUE(host.is_pinned());
  EXPECT_TRUE(host.narrow(0, 100, 10).is_pinned());
  // A tensor that somebody makes over a piece of it is pinned too: that is how a slab pool hands out memory.
  const auto piece = at::from_blob(host.data_ptr<uint8_t>() + 4096, {64}, at::kByte);
  EXPECT_TRUE(piece.is_pinned());
  EXPECT_NE(out_of_memory([] { at::empty({kMiB}, pinned().dtype(at::kByte)); }).find("1.00 MiB"), std::string::npos);
  host.reset();
  EXPECT_EQ(control().pinned_memory().requested, before.requested);
  configure([](sim::DeviceConfig& config) { config.pinned_capacity = Bytes(); });
}

TEST_F(Memory, KnowsItsAddresses) {
  const auto t = bytes(100, 1);
  const auto& hooks = at::detail::getPrivateUse1Hooks();
  EXPECT_EQ(hooks.getDeviceFromPtr(t.data_ptr()), sim(1));
  const auto host = at::empty({4});
  EXPECT_THROW(hooks.getDeviceFromPtr(host.data_ptr()), c10::Error);
}

TEST_F(Memory, AViewOfAKernelsResultKeepsItAlive) {
  auto parts = at::native_layer_norm(at::ones({4, 8}, on_sim()), {8}, {}, {}, 1e-5);
  const auto row = std::get<0>(parts)[2];
  parts = {};
  EXPECT_TRUE(bit_equal(row, at::zeros({8})));
}

}  // namespace
}  // namespace neap::testing
