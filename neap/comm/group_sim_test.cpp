// Collectives over the memory of an asynchronous device: the simulated one, with its hazard checker on.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <string>
#include <variant>
#include <vector>

#include "neap/comm/failure.h"
#include "neap/comm/group.h"
#include "neap/comm/world.h"
#include "neap/device/device.h"
#include "neap/device/host_task.h"
#include "neap/trace/recorder.h"
#include "testing/collective_contract.h"
#include "testing/matchers.h"
#include "testing/ranks.h"
#include "testing/sim_fixture.h"

namespace neap::comm {
namespace {

using testing::bit_equal;
using ::testing::HasSubstr;
using testing::on_sim;
using testing::run_ranks;
using testing::sim;

const bool kFourDevices = testing::use_sim_devices(4);

class GroupSim : public testing::SimTest {};

TEST_F(GroupSim, KeepsItsContract) {
  for (const int ranks : {1, 2, 3, 4})
    run_ranks(ranks, [](World& world) { testing::check_collectives(world.all(), sim(world.rank())); });
}

// wait() returns while another rank has not even begun; what is enqueued after it sees the result all the same.
TEST_F(GroupSim, WaitOrdersTheStreamAndDoesNotBlockTheHost) {
  std::latch waited(1);
  run_ranks(2, [&](World& world) {
    const at::Tensor tensor = at::full({1000}, world.rank() + 1.f, on_sim(world.rank()));
    if (world.rank() == 1) waited.wait();
    Work work = world.all().all_reduce(tensor, {}, "unit");
    work.wait();
    if (world.rank() == 0) {
      EXPECT_FALSE(work.done());
      waited.count_down();
    }
    EXPECT_TRUE(bit_equal((tensor * 2).cpu(), at::full({1000}, 6.f)));
    work.synchronize();
    EXPECT_TRUE(work.done());
  });
}

// The collective starts after the kernel that makes its input; without wait() the next kernel races with it, and the
// checker says so.
TEST_F(GroupSim, TheCheckerSeesWhatACollectiveTouches) {
  const auto use_result = [](World& world, bool wait) {
    const at::Tensor full = at::ones({2000}, on_sim(world.rank())), mine = at::zeros({1000}, full.options());
    full.mul_(3);
    Work work = world.all().reduce_scatter(mine, full, {}, "unit");
    if (wait) work.wait();
    const at::Tensor used = mine + 1;
    work.wait();
  };
  run_ranks(2, [&](World& world) { use_result(world, true); });
  synchronize();
  EXPECT_THAT(take_hazards(), ::testing::IsEmpty());

  run_ranks(2, [&](World& world) { use_result(world, false); });
  synchronize();
  EXPECT_THAT(take_hazards(), ::testing::Contains(HasSubstr("'reduce_scatter' on sim:")));
}

TEST_F(GroupSim, AWorkThatIsDroppedGuardsItsMemory) {
  run_ranks(2, [](World& world) {
    for (int i = 0; i < 20; ++i) {
      at::Tensor tensor = at::ones({1000}, on_sim(world.rank()));
      world.all().all_reduce(tensor, {}, "dropped");
      tensor.reset();
      const at::Tensor reuses_the_memory = at::zeros({1000}, on_sim(world.rank()));
    }
  });
}

TEST_F(GroupSim, AWaitedWorkHoldsNothing) {
  run_ranks(2, [](World& world) {
    at::Tensor tensor = at::ones({1000}, on_sim(world.rank()));
    Work work = world.all().all_reduce(tensor, {}, "unit");
    work.wait();
    tensor.reset();
    EXPECT_EQ(control().memory(world.rank()).requested, 0);
  });
}

// On the virtual clock a collective takes what a ring would: its share of the bytes and a latency a step.
TEST_F(GroupSim, CostsWhatARingCosts) {
  configure([](sim::DeviceConfig& config) {
    config.peer_gbps = 10;
    config.latency_ns = 1'000;
  });
  run_ranks(4, [](World& world) {
    const int rank = world.rank();
    const at::Tensor full = at::zeros({40'000}, on_sim(rank));
    const int64_t before = control().counters(rank).peer.busy_ns;
    world.all().all_gather(full, "unit").wait();
    EXPECT_EQ(control().counters(rank).peer.busy_ns - before, 120'000 / 10 + 3 * 1'000);
    world.all().all_reduce(full, {}, "unit").wait();
    EXPECT_EQ(control().counters(rank).peer.busy_ns - before, 3 * (120'000 / 10 + 3 * 1'000));
  });
}

// Named by collective and unit, on a track of the group's; what CPU tensors do takes no time on this clock.
TEST_F(GroupSim, IsDrawnByUnitOnTheDevicesClock) {
  configure([](sim::DeviceConfig& config) {
    config.peer_gbps = 10;
    config.latency_ns = 1'000;
  });
  trace::Recorder recorder;
  control().set_recorder(&recorder);
  testing::RanksOptions options;
  options.world.recorder = &recorder;
  options.world.clock = [] { return control().host_time_ns(0); };
  run_ranks(
      2,
      [](World& world) {
        const at::Tensor full = at::zeros({40'000}, on_sim(world.rank())), losses = at::zeros({2});
        world.all().all_gather(full, "layers.3").wait();
        world.all().all_gather(losses, "losses").wait();
      },
      options);
  synchronize();
  control().set_recorder(nullptr);
  const trace::Snapshot snapshot = recorder.snapshot();
  const auto gathers = snapshot.find("comm/world", "all_gather layers.3");
  ASSERT_EQ(gathers.size(), 2U) << "one of each rank";
  for (const trace::Event& gather : gathers) {
    EXPECT_EQ(gather.end_ns - gather.begin_ns, 80'000 / 10 + 1'000);
    EXPECT_EQ(std::get<int64_t>(snapshot.args_of(gather).front().value), 80'000);
  }
  const auto on_host = snapshot.find("comm/world", "all_gather losses");
  ASSERT_EQ(on_host.size(), 2U);
  for (const trace::Event& instant : on_host) EXPECT_EQ(instant.kind, trace::Kind::kInstant);
  EXPECT_THAT(snapshot.find("sim:0/copies between devices", "all_gather"), ::testing::IsEmpty());
}

// Compute goes on under a collective: together they take the longer of the two.
TEST_F(GroupSim, OverlapsWithComputeOnTheVirtualClock) {
  configure([](sim::DeviceConfig& config) {
    config.peer_gbps = 1;
    config.kernel_min_ns = 20'000;
    config.launch_ns = config.event_ns = 0;
  });
  run_ranks(2, [](World& world) {
    const int rank = world.rank();
    auto& device = device::Device::of(sim(rank));
    const at::Tensor full = at::zeros({20'000}, on_sim(rank)), other = at::zeros({8}, on_sim(rank));
    device.synchronize();
    const int64_t begin = control().host_time_ns(rank);
    Work gather = world.all().all_gather(full, "next unit");  // 40,000 ns and a latency
    for (int i = 0; i < 4; ++i) other.add_(1);                // 80,000 ns
    gather.wait();
    device.synchronize();
    EXPECT_EQ(control().host_time_ns(rank) - begin, 80'000);
  });
}

TEST_F(GroupSim, CollectivesOfHostAndDeviceDoNotMeet) {
  run_ranks(2, [](World& world) {
    Group& group = world.all();
    const at::Tensor host = at::ones({5000}), device = at::ones({5000}, on_sim(world.rank()));
    std::vector<Work> works;
    for (int i = 0; i < 10; ++i) {
      works.push_back(group.all_reduce(device, {}, "device"));
      works.push_back(group.all_reduce(host, {}, "host"));
      if (world.rank() == 0) works.push_back(Work());
    }
    for (auto& work : works) work.wait();
    EXPECT_TRUE(bit_equal(host, at::full({5000}, 1024.f)));
    EXPECT_TRUE(bit_equal(device.cpu(), host));
  });
}

TEST_F(GroupSim, FailuresReachTheHost) {
  std::vector<std::string> texts(2);
  EXPECT_THROW(run_ranks(2,
                         [&](World& world) {
                           const at::Tensor tensor = at::ones({100 + world.rank()}, on_sim(world.rank()));
                           Work work = world.all().all_reduce(tensor, {}, "layers.3");
                           try {
                             work.wait();  // may not know yet
                             work.synchronize();
                           } catch (const Mismatch& error) {
                             texts[static_cast<size_t>(world.rank())] = error.what();
                           }
                           EXPECT_THROW(world.check(), Mismatch);
                           EXPECT_THROW(world.all().all_reduce(tensor, {}, "later"), Mismatch);
                           world.check();
                         }),
               Mismatch);
  EXPECT_THAT(texts, ::testing::Each(HasSubstr("all_reduce of 'layers.3' in group 'world'")));
}

TEST_F(GroupSim, MetaTensorsAreRefused) {
  run_ranks(2, [](World& world) {
    Group& group = world.all();
    group.barrier("before").wait();
    try {
      group.all_reduce(at::empty({4}, at::TensorOptions().device(at::kMeta)), {}, "u").wait();
      ADD_FAILURE() << "expected UserError";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("[comm] all_reduce of 'u' expected a tensor with memory; found one on meta"));
    }
  });
}

}  // namespace
}  // namespace neap::comm
