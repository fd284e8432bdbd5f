// The contract of neap/device on an asynchronous device: the simulated one, whose copy engines a test can hold and
// whose hazard checker fails a test that orders too little.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "neap/base/scope_exit.h"
#include "neap/device/copy.h"
#include "neap/device/device.h"
#include "testing/sim_fixture.h"

namespace neap::device {
namespace {

using neap::sim::Link;
using neap::testing::on_sim;
using neap::testing::pinned;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kSize = 1 << 20;

class DeviceOnSim : public neap::testing::SimTest {
 protected:
  static Device& device() { return Device::of(neap::testing::sim()); }
  static Stream out() { return device().copy_stream(Direction::kOut); }
  static Stream in() { return device().copy_stream(Direction::kIn); }
  static at::Tensor host_bytes() { return at::empty({kSize}, pinned().dtype(at::kByte)); }
  static at::Tensor device_bytes(int value) { return at::full({kSize}, value, on_sim().dtype(at::kByte)); }
  // Copies behind the work of the current stream.
  static Event copy_out(const at::Tensor& host, const at::Tensor& source) {
    out().wait(device().current_stream().record());
    copy_bytes_async(host, source, out());
    return out().record();
  }
  static bool all(const at::Tensor& host, int value) { return at::equal(host, at::full_like(host, value)); }
};

TEST_F(DeviceOnSim, FillsInTheIndexOfTheCurrentDevice) {
  EXPECT_EQ(Device::of(c10::Device(neap::testing::kSim)).c10_device(), neap::testing::sim(0));
  const c10::DeviceGuard guard(neap::testing::sim(1));
  EXPECT_EQ(&Device::of(c10::Device(neap::testing::kSim)), &Device::of(at::empty({1}, on_sim(1))));
  EXPECT_TRUE(device().asynchronous());
}

TEST_F(DeviceOnSim, GivesEachThreadItsCurrentStream) {
  const auto mine = device().current_stream();
  const c10::StreamGuard guard(out().unwrap());
  EXPECT_EQ(device().current_stream(), out());
  std::thread([&] { EXPECT_EQ(device().current_stream(), mine); }).join();
}

TEST_F(DeviceOnSim, TakesItsCopyStreamsOnceAndKeepsThem) {
  const auto kept = std::pair(out(), in());
  EXPECT_FALSE(kept.first == kept.second);
  EXPECT_FALSE(kept.first == device().current_stream());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int draw = 0; draw < 40; ++draw) {
        EXPECT_EQ(out(), kept.first);
        EXPECT_EQ(in(), kept.second);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(Device::of(neap::testing::sim(1)).copy_stream(Direction::kOut).unwrap().device(), neap::testing::sim(1));
}

TEST_F(DeviceOnSim, CopiesToTheLastBitBothWays) {
  const auto values = at::arange(kSize, at::kLong).mul(2654435761).bitwise_right_shift(16).to(at::kByte);
  const auto source = values.to(neap::testing::sim());
  const auto host = host_bytes();
  const auto back = at::empty({kSize}, on_sim().dtype(at::kByte));
  const auto copied = copy_out(host, source);
  in().wait(copied);
  in().wait(device().current_stream().record());
  copy_bytes_async(back, host, in());
  device().current_stream().wait(in().record());
  EXPECT_TRUE(at::equal(back.cpu(), values));
  EXPECT_EQ(control().counters(0).d2h.bytes, 2 * kSize);  // ours and .cpu()
}

TEST_F(DeviceOnSim, ReturnsBeforeTheCopyIsDone) {
  auto held = hold_copies(Link::kDeviceToHost);
  const auto source = device_bytes(7);
  const auto host = host_bytes();
  const auto copied = copy_out(host, source);
  EXPECT_FALSE(copied.query());
  EXPECT_FALSE(out().query());
  const auto computed = device_bytes(3).add(1);  // the compute stream goes on
  device().current_stream().synchronize();
  EXPECT_FALSE(copied.query());
  held.resume();
  copied.synchronize();
  EXPECT_TRUE(copied.query());
  EXPECT_TRUE(all(host, 7));
}

TEST_F(DeviceOnSim, CopiesOfTheTwoDirectionsOverlap) {
  auto held = hold_copies(Link::kDeviceToHost);
  const auto leaving = host_bytes();
  const auto source = device_bytes(7);
  const auto stuck = copy_out(leaving, source);
  const auto host = host_bytes().fill_(5);
  const auto arriving = at::empty({kSize}, on_sim().dtype(at::kByte));
  in().wait(device().current_stream().record());
  copy_bytes_async(arriving, host, in());
  in().synchronize();
  EXPECT_FALSE(stuck.query());
  held.resume();
  stuck.synchronize();
}

TEST_F(DeviceOnSim, AnEventIsOnePointThatCopiesShare) {
  const auto source = device_bytes(7);
  const auto host = host_bytes();
  auto before = out().record();
  const auto shared = before;
  auto held = hold_copies(Link::kDeviceToHost);
  before = copy_out(host, source);  // records again: the copy of the former event does not follow
  shared.synchronize();
  EXPECT_TRUE(shared.query());
  EXPECT_FALSE(before.query());
  held.resume();
  before.synchronize();
}

TEST_F(DeviceOnSim, AWaitIsForTheRecordingItSaw) {
  auto held = hold_copies(Link::kDeviceToHost);
  const auto stream = device().current_stream();
  auto event = stream.record();
  const auto source = device_bytes(7);
  const auto host = host_bytes();
  in().wait(event);
  event = copy_out(host, source);  // in the pool the driver's event may be the one that was just waited for
  in().synchronize();
  EXPECT_FALSE(event.query());
  held.resume();
  event.synchronize();
}

TEST_F(DeviceOnSim, AWaitOrdersTheStreams) {
  auto source = device_bytes(7);
  const auto host = host_bytes();
  device().current_stream().wait(copy_out(host, source));
  source.fill_(8);
  synchronize();
  EXPECT_TRUE(all(host, 7));
}

TEST_F(DeviceOnSim, WithoutAWaitTheCheckerFindsTheRace) {
  auto source = device_bytes(7);
  const auto host = host_bytes();
  (void)copy_out(host, source);
  source.fill_(8);
  synchronize();
  EXPECT_THAT(take_hazards(), Not(IsEmpty())) << "then the tests beside this one show nothing";
}

TEST_F(DeviceOnSim, TakesNoNewEventsFromTheDriverInASteadyRun) {
  const auto step = [] {
    std::vector<Event> events;
    for (int i = 0; i < 50; ++i) events.push_back(i % 2 ? out().record() : in().record_timed());
    for (auto& event : events) device().current_stream().wait(event);
  };
  step();
  const auto after_first = device().driver_events();
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(device().driver_events(), after_first);
}

TEST_F(DeviceOnSim, MeasuresTimeBetweenTimedEvents) {
  throttle_copies(/*d2h_gbps=*/1, /*h2d_gbps=*/1, /*latency_ns=*/1'000);
  const auto source = device_bytes(7);
  const auto host = host_bytes();
  synchronize();
  const auto begin = out().record_timed();
  copy_bytes_async(host, source, out());
  const auto end = out().record_timed();
  end.synchronize();
  const auto elapsed = Event::elapsed_ns(begin, end);
  ASSERT_TRUE(elapsed.has_value());
  EXPECT_NEAR(static_cast<double>(*elapsed), kSize + 1'000, 10'000);
  EXPECT_EQ(Event::elapsed_ns(begin, out().record()), std::nullopt);
}

TEST_F(DeviceOnSim, HasTheClockThatWasRegistered) {
  set_clock(neap::testing::kSim, [](c10::DeviceIndex index) { return control().host_time_ns(index); });
  const ScopeExit no_clock([] { set_clock(neap::testing::kSim, {}); });
  const auto before = device().now_ns();
  EXPECT_EQ(before, control().host_time_ns(0));
  const auto work = device_bytes(1);
  EXPECT_GE(device().now_ns(), before + static_cast<int64_t>(control().config().launch_ns));
}

TEST_F(DeviceOnSim, ReportsWhatItsAllocatorCounts) {
  const auto before = *device().memory_stats();
  device().reset_peak();
  {
    const auto tensor = device_bytes(1);
    EXPECT_EQ(device().memory_stats()->allocated, before.allocated + Bytes(kSize));
    EXPECT_EQ(device().capacity()->total, control().config().capacity);
    EXPECT_EQ(device().capacity()->free, device().capacity()->total - device().memory_stats()->allocated);
  }
  const auto after = *device().memory_stats();
  EXPECT_EQ(after.allocated, before.allocated);
  EXPECT_EQ(after.allocated_peak, before.allocated + Bytes(kSize));
  device().reset_peak();
  EXPECT_EQ(device().memory_stats()->allocated_peak, before.allocated);
}

TEST_F(DeviceOnSim, MemoryRecordedOnAStreamIsNotReusedBeforeItsWork) {
  auto held = hold_copies(Link::kDeviceToHost);
  const auto host = host_bytes();
  {
    const auto source = device_bytes(7);
    (void)copy_out(host, source);
    device().record_on_stream(source.storage().data_ptr(), out());
  }
  const auto next = device_bytes(8);  // would take the memory of `source` if it were free
  device().current_stream().synchronize();
  held.resume();
  synchronize();
  EXPECT_TRUE(all(host, 7));
}

TEST_F(DeviceOnSim, AHookSeesCopiesAndCanFailThem) {
  const auto source = device_bytes(7);
  const auto host = host_bytes();
  std::vector<Direction> seen;
  device().set_copy_hook([&](const Copy& copy) {
    seen.push_back(copy.direction);
    if (seen.size() == 2) throw std::runtime_error("link down");
  });
  const ScopeExit no_hook([] { device().set_copy_hook({}); });
  const auto copied = copy_out(host, source);
  in().wait(copied);
  EXPECT_THROW(copy_bytes_async(source, host, in()), std::runtime_error);
  EXPECT_THAT(seen, ::testing::ElementsAre(Direction::kOut, Direction::kIn));
  EXPECT_EQ(control().counters(0).h2d.copies, 0);
  synchronize();
  EXPECT_TRUE(all(host, 7));
}

TEST_F(DeviceOnSim, CopiesOnTheDeviceOfTheStreamWhateverTheCurrentOne) {
  auto& second = Device::of(neap::testing::sim(1));
  const auto source = at::full({kSize}, 9, on_sim(1).dtype(at::kByte));
  const auto host = host_bytes();
  const auto stream = second.copy_stream(Direction::kOut);
  stream.wait(second.current_stream().record());
  copy_bytes_async(host, source, stream);
  stream.record().synchronize();
  EXPECT_TRUE(all(host, 9));
  EXPECT_EQ(Device::of(c10::Device(neap::testing::kSim)).c10_device(), neap::testing::sim(0));
  EXPECT_EQ(control().counters(1).d2h.copies, 1);
}

}  // namespace
}  // namespace neap::device
