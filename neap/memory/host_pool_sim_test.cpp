// The host pool under copies that are really under way: reuse, reads, pinning and limits on the simulated device.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "neap/device/copy.h"
#include "neap/device/device.h"
#include "neap/memory/host_pool.h"
#include "testing/sim_fixture.h"

namespace neap::memory {
namespace {

using namespace neap::literals;
using device::Device;
using device::Direction;
using neap::sim::Link;
using neap::testing::on_sim;

constexpr int64_t kSize = 1 << 20;

class HostPoolOnSim : public neap::testing::SimTest {
 protected:
  static HostPool::Options options() { return {.slab_size = 4_MiB, .device = neap::testing::sim()}; }
  static Device& device() { return Device::of(neap::testing::sim()); }

  static at::Tensor device_bytes(int value) { return at::full({kSize}, value, on_sim().dtype(at::kByte)); }
  // Sends bytes to the host behind the current stream's work; the current stream then waits, so `source` may go.
  static void send_out(HostBuffer& buffer, const at::Tensor& source) {
    const auto stream = device().copy_stream(Direction::kOut);
    stream.wait(device().current_stream().record());
    copy_bytes_async(buffer.tensor(), source, stream);
    buffer.set_pending(stream.record());
    device().current_stream().wait(buffer.pending());
  }
  // Brings them back. The copy is still under way on return; the current stream waits for it.
  static at::Tensor bring_in(HostBuffer& buffer) {
    auto result = at::empty({buffer.size().count}, on_sim().dtype(at::kByte));
    const auto stream = device().copy_stream(Direction::kIn);
    stream.wait(device().current_stream().record());
    stream.wait(buffer.pending());
    copy_bytes_async(result, buffer.tensor(), stream);
    buffer.set_pending(stream.record());
    device().current_stream().wait(buffer.pending());
    return result;
  }
  static bool all(const at::Tensor& tensor, int value) {
    const auto host = tensor.cpu();
    return at::equal(host, at::full_like(host, value));
  }
};

TEST_F(HostPoolOnSim, LocksExactlyTheSlabsItCounts) {
  const auto before = control().pinned_memory().requested;
  HostPool pool(options());
  const auto small = pool.acquire(100_B);
  const auto inside = pool.acquire(100_B);
  const auto large = pool.acquire(129_MiB);
  EXPECT_EQ(control().pinned_memory().requested - before, (133_MiB).count);
  EXPECT_EQ(pool.counters().locked, 133_MiB);
  EXPECT_TRUE(small.tensor().is_pinned());
  EXPECT_TRUE(inside.tensor().is_pinned());
  EXPECT_TRUE(large.tensor().is_pinned());
}

TEST_F(HostPoolOnSim, ReusesABlockOnlyAfterTheCopyThatReadsIt) {
  HostPool pool(options());
  auto buffer = pool.acquire(Bytes(kSize));
  send_out(buffer, device_bytes(7));
  synchronize();
  auto held = hold_copies(Link::kHostToDevice);
  const auto back = bring_in(buffer);
  const auto* address = buffer.data();
  buffer.release();  // the copy in is queued and has not started
  EXPECT_EQ(pool.counters().in_flight, Bytes(kSize));
  auto next = pool.acquire(Bytes(kSize));
  EXPECT_NE(next.data(), address);
  std::memset(next.data(), 9, kSize);
  held.resume();
  EXPECT_TRUE(all(back, 7));
  EXPECT_EQ(pool.acquire(Bytes(kSize)).data(), address);
}

TEST_F(HostPoolOnSim, ReusesABlockOnlyAfterTheCopyThatWritesIt) {
  HostPool pool(options());
  auto held = hold_copies(Link::kDeviceToHost);
  const void* address = nullptr;
  try {
    auto buffer = pool.acquire(Bytes(kSize));
    address = buffer.data();
    send_out(buffer, device_bytes(7));
    throw std::runtime_error("forward failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(pool.counters().in_flight, Bytes(kSize)) << "however the buffer goes, its copy is not forgotten";
  EXPECT_NE(pool.acquire(Bytes(kSize)).data(), address);
  held.resume();
  synchronize();
  EXPECT_EQ(pool.counters().in_flight, 0_B);
  EXPECT_EQ(pool.acquire(Bytes(kSize)).data(), address);
}

TEST_F(HostPoolOnSim, IsRightWhenSlabsAreSmallerThanAStepAndTheLinkIsSlow) {
  throttle_copies(/*d2h_gbps=*/4, /*h2d_gbps=*/1);
  auto small = options();
  small.slab_size = Bytes(3 * kSize / 2);
  HostPool pool(small);
  for (int step = 0; step < 3; ++step) {
    std::vector<HostBuffer> buffers;
    for (int i = 0; i < 6; ++i) {
      buffers.push_back(pool.acquire(Bytes(kSize)));
      send_out(buffers.back(), device_bytes(10 * step + i));
    }
    for (int i = 5; i >= 0; --i) {
      const auto back = bring_in(buffers.back());
      buffers.pop_back();
      ASSERT_TRUE(all(back, 10 * step + i)) << "step " << step << ", tensor " << i;
    }
  }
}

TEST_F(HostPoolOnSim, ASteadyRunNeitherAllocatesNorWaits) {
  throttle_copies(/*d2h_gbps=*/8, /*h2d_gbps=*/8);
  HostPool pool(options());
  const auto step = [&] {
    std::vector<HostBuffer> buffers;
    for (int i = 0; i < 8; ++i) {
      buffers.push_back(pool.acquire(Bytes(kSize / (1 + i % 3))));
      const auto source = device_bytes(i);
      send_out(buffers.back(), source.narrow(0, 0, buffers.back().size().count));
    }
    for (; !buffers.empty(); buffers.pop_back()) (void)bring_in(buffers.back());
  };
  // As a training loop reads its loss. A host that never looks at the device needs blocks for every step it is ahead.
  const auto end_step = [] { synchronize(); };
  for (int i = 0; i < 2; ++i) step(), end_step();
  const auto pinned_allocations = control().pinned_memory().allocations;
  const auto slabs = pool.counters().slab_allocations;
  const auto events = device().driver_events();
  for (int i = 0; i < 5; ++i) {
    control().reset_counters(0);
    step();
    EXPECT_EQ(control().counters(0).host_waits, 0);
    EXPECT_GT(pool.counters().in_flight, 0_B) << "the link was too fast for this test to show anything";
    end_step();
  }
  EXPECT_EQ(control().pinned_memory().allocations, pinned_allocations);
  EXPECT_EQ(pool.counters().slab_allocations, slabs);
  EXPECT_EQ(device().driver_events(), events);
}

TEST_F(HostPoolOnSim, AReadWaitsForTheCopy) {
  throttle_copies(/*d2h_gbps=*/1, /*h2d_gbps=*/1);
  HostPool pool(options());
  auto buffer = pool.acquire(Bytes(kSize));
  const auto start = control().host_time_ns(0);
  send_out(buffer, device_bytes(7));
  const auto bytes = buffer.read();
  control().host_read(bytes.data(), kSize, "test reads the buffer");
  EXPECT_GE(control().host_time_ns(0) - start, kSize);  // a byte a nanosecond
  EXPECT_EQ(bytes.front(), std::byte(7));
  EXPECT_EQ(bytes.back(), std::byte(7));
}

TEST_F(HostPoolOnSim, AReadThatDoesNotWaitIsFoundByTheChecker) {
  throttle_copies(/*d2h_gbps=*/1, /*h2d_gbps=*/1);
  HostPool pool(options());
  auto buffer = pool.acquire(Bytes(kSize));
  send_out(buffer, device_bytes(7));
  control().host_read(buffer.data(), kSize, "test reads too early");
  EXPECT_THAT(take_hazards(), ::testing::SizeIs(::testing::Ge(1)));
}

TEST_F(HostPoolOnSim, WaitsForCopiesBeforeItsMemoryGoes) {
  throttle_copies(/*d2h_gbps=*/1, /*h2d_gbps=*/1);
  control().reset_counters(0);
  {
    HostPool pool(options());
    auto buffer = pool.acquire(Bytes(kSize));
    send_out(buffer, device_bytes(7));
    buffer.release();
    EXPECT_EQ(control().counters(0).host_waits, 0);
  }
  EXPECT_EQ(control().counters(0).host_waits, 1);
}

TEST_F(HostPoolOnSim, GivesPinnedMemoryBackBeyondItsCacheLimit) {
  const auto before = control().pinned_memory().requested;
  auto limited = options();
  limited.cache_limit = 8_MiB;
  HostPool pool(limited);
  std::vector<HostBuffer> buffers;
  for (int i = 0; i < 16; ++i) buffers.push_back(pool.acquire(2_MiB));
  EXPECT_EQ(control().pinned_memory().requested - before, (32_MiB).count);
  buffers.clear();
  EXPECT_EQ(control().pinned_memory().requested - before, (8_MiB).count);
  EXPECT_EQ(pool.counters().idle, 8_MiB);
  pool.trim();
  EXPECT_EQ(control().pinned_memory().requested - before, 0);
}

TEST_F(HostPoolOnSim, UsesPageableMemoryWithOneWarningWhenNoneCanBeLocked) {
  const auto pinned_now = control().pinned_memory().current;
  configure([&](auto& config) { config.pinned_capacity = Bytes(pinned_now) + 2_MiB; });
  std::vector<std::string> warnings;
  const auto former = set_log_sink([&](LogLevel, const std::string& text) { warnings.push_back(text); });
  const ScopeExit restore([&] { set_log_sink(former); });
  HostPool pool(options());
  auto first = pool.acquire(Bytes(4 * kSize));
  auto second = pool.acquire(Bytes(4 * kSize));
  EXPECT_FALSE(first.tensor().is_pinned());
  EXPECT_THAT(warnings, ::testing::ElementsAre(::testing::AllOf(::testing::HasSubstr("pinned host memory for sim:0"),
                                                                ::testing::Not(::testing::HasSubstr("frame #")))));
  auto third = pool.acquire(Bytes(kSize));
  send_out(third, device_bytes(7));
  EXPECT_TRUE(all(bring_in(third), 7));
}

}  // namespace
}  // namespace neap::memory
