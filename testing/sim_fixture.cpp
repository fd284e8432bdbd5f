#include "testing/sim_fixture.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "neap/device/host_task.h"

namespace neap::sim {
extern "C" Control& neap_sim_control_v3();
}

namespace neap::testing {
namespace {

int devices_of_this_executable = 2;

}  // namespace

bool use_sim_devices(int devices) {
  devices_of_this_executable = devices;
  return true;
}

// Linked, not loaded: registering is a call, so linking the library changes nothing in tests that do not use it.
sim::Control& sim_control() {
  static auto& control = []() -> sim::Control& {
    auto& made = sim::neap_sim_control_v3();
    made.configure(default_config());
    device::set_host_task_launcher(kSim, [&made](const device::Stream& stream, HostTask task) {
      made.run_on_stream(stream.unwrap().device_index(), stream.unwrap().id(), std::move(task));
    });
    return made;
  }();
  return control;
}

HeldCopies::HeldCopies(int device, sim::Link link) : device_(device), link_(link) { sim_control().pause(device, link); }

HeldCopies::~HeldCopies() { resume(); }

void HeldCopies::resume() {
  if (held_) sim_control().resume(device_, link_);
  held_ = false;
}

sim::DeviceConfig default_config() {
  sim::DeviceConfig config;
  config.devices = devices_of_this_executable;
  config.hazard_check = true;
  config.poison = true;
  return config;
}

void SimTest::configure(const std::function<void(sim::DeviceConfig&)>& change) {
  auto config = control().config();
  change(config);
  control().configure(config);
}

void SimTest::throttle_copies(double d2h_gbps, double h2d_gbps, double latency_ns) {
  configure([&](sim::DeviceConfig& config) {
    config.d2h_gbps = d2h_gbps;
    config.h2d_gbps = h2d_gbps;
    config.latency_ns = latency_ns;
  });
}

void SimTest::use_clock(sim::Clock clock) {
  configure([&](sim::DeviceConfig& config) { config.clock = clock; });
}

void SimTest::synchronize() {
  const c10::impl::VirtualGuardImpl guard(kSim);
  for (int device = 0; device < guard.deviceCount(); ++device)
    guard.synchronizeDevice(static_cast<c10::DeviceIndex>(device));
}

void SimTest::accept_live_bytes() {
  baseline_.clear();
  for (int device = 0; device < control().config().devices; ++device) baseline_.push_back(control().memory(device));
  baseline_.push_back(control().pinned_memory());
}

void SimTest::SetUp() {
  auto& device = control();
  synchronize();
  device.configure(default_config());
  device.take_hazards();
  for (int i = 0; i < default_config().devices; ++i) {
    device.reset_counters(i);
    device.reset_peak(i);
  }
  device.reset_pinned_peak();
  at::manual_seed(0);
  accept_live_bytes();
}

void SimTest::TearDown() {
  synchronize();
  for (const auto& hazard : take_hazards()) ADD_FAILURE() << "hazard: " << hazard;
  const auto check = [](const sim::MemoryStats& now, const sim::MemoryStats& before, const std::string& where) {
    EXPECT_EQ(now.requested, before.requested) << where << ": bytes are not back at the baseline";
    EXPECT_EQ(now.live_blocks, before.live_blocks) << where << ": blocks are left over";
  };
  for (std::size_t i = 0; i + 1 < baseline_.size(); ++i)
    check(control().memory(static_cast<int>(i)), baseline_[i], "sim:" + std::to_string(i));
  check(control().pinned_memory(), baseline_.back(), "pinned memory");
}

}  // namespace neap::testing
