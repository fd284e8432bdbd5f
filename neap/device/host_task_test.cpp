// Host functions in the order of a stream: on a CPU, and on the simulated device.
#include "neap/device/host_task.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/device/device.h"
#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::device {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using testing::on_sim;

TEST(HostTask, OnACpuItRunsBeforeTheCallReturns) {
  bool ran = false;
  HostTask task;
  task.work = [&ran] { ran = true; };
  launch_host_task(Device::of(c10::Device(c10::kCPU)).current_stream(), std::move(task));
  EXPECT_TRUE(ran);
}

class HostTaskSim : public testing::SimTest {
 protected:
  static Device& device() { return Device::of(testing::sim()); }
  // Doubles the tensor, behind torch's back.
  static HostTask doubling(const at::Tensor& tensor) {
    HostTask task;
    auto* data = static_cast<float*>(tensor.mutable_data_ptr());
    task.work = [data, n = tensor.numel()] {
      for (int64_t i = 0; i < n; ++i) data[i] *= 2;
    };
    task.what = "doubling";
    task.ranges = {{data, static_cast<int64_t>(tensor.nbytes()), true}};
    return task;
  }
};

TEST_F(HostTaskSim, RunsInTheOrderOfItsStream) {
  const at::Tensor tensor = at::full({100}, 3.f, on_sim());
  launch_host_task(device().current_stream(), doubling(tensor));
  tensor.add_(1);
  launch_host_task(device().current_stream(), doubling(tensor));
  EXPECT_TRUE(testing::bit_equal(tensor.cpu(), at::full({100}, 14.f)));
}

TEST_F(HostTaskSim, ReturnsBeforeTheWorkIsDoneAndEventsPassAfterIt) {
  use_clock(sim::Clock::kReal);
  std::latch go(1);
  HostTask task;
  task.work = [&go] { go.wait(); };
  task.what = "waiting";
  const Stream stream = device().collective_stream();
  launch_host_task(stream, std::move(task));
  const Event end = stream.record();
  EXPECT_FALSE(end.query());
  go.count_down();
  end.synchronize();
  EXPECT_TRUE(end.query());
}

TEST_F(HostTaskSim, TheCheckerKnowsWhatItTouches) {
  const at::Tensor tensor = at::full({100}, 3.f, on_sim());
  launch_host_task(device().collective_stream(), doubling(tensor));
  synchronize();
  EXPECT_THAT(take_hazards(), Contains(HasSubstr("'doubling' on sim:0")));
}

TEST_F(HostTaskSim, MemoryThatIsFreedAfterTheCallStaysUntilItHasRun) {
  const Stream stream = device().current_stream();
  auto held = hold_copies(sim::Link::kPeer);
  at::Tensor tensor = at::full({100}, 3.f, on_sim());
  launch_host_task(stream, doubling(tensor));
  tensor.reset();  // poisoned as soon as nobody holds it
  EXPECT_EQ(live_bytes(), 0);
  held.resume();
  stream.synchronize();
}

TEST_F(HostTaskSim, CostsBytesAndLatenciesOfTheLinkBetweenDevices) {
  configure([](sim::DeviceConfig& config) {
    config.peer_gbps = 2;
    config.latency_ns = 100;
  });
  HostTask task;
  task.work = [] {};
  task.what = "free";
  task.wire_bytes = Bytes(4'000);
  task.latencies = 3;
  launch_host_task(device().current_stream(), std::move(task));
  EXPECT_EQ(control().counters(0).peer, (sim::LinkCounters{.copies = 1, .bytes = 4'000, .busy_ns = 2'300}));
}

TEST_F(HostTaskSim, ADeviceTypeWithoutALauncherSaysSo) {
  ASSERT_TRUE(has_host_task_launcher(testing::kSim));
  set_host_task_launcher(testing::kSim, {});
  const ScopeExit restore([] {
    set_host_task_launcher(testing::kSim, [](const Stream& stream, HostTask task) {
      control().run_on_stream(stream.unwrap().device_index(), stream.unwrap().id(), std::move(task));
    });
  });
  HostTask task;
  task.what = "all_gather";
  try {
    launch_host_task(device().current_stream(), std::move(task));
    ADD_FAILURE() << "expected UserError";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("[device] 'all_gather' expected a device type whose streams run host functions"));
  }
}

TEST_F(HostTaskSim, CollectivesHaveOneStreamOfTheirOwn) {
  const Stream stream = device().collective_stream();
  EXPECT_EQ(stream, device().collective_stream());
  EXPECT_FALSE(stream == device().current_stream());
  EXPECT_FALSE(stream == device().copy_stream(Direction::kOut));
  EXPECT_FALSE(stream == device().copy_stream(Direction::kIn));
}

}  // namespace
}  // namespace neap::device
