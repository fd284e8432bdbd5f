#include "cli/open_device.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <algorithm>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/device/device.h"
#include "neap/device/host_task.h"
#include "neap/sim/control.h"
#include "neap/sim/loader.h"

namespace neap::cli {
namespace {

using train::DeviceKind;
using train::DeviceSection;

// More than any host has, so that the host's own memory is the limit.
constexpr Bytes kUnlimited(int64_t{1} << 46);

double gb_per_s(Bytes rate) { return static_cast<double>(rate.count) * 1e-9; }

// `config` as NEAP_SIM may have described it; what the run file has a key for, the run file decides.
sim::DeviceConfig sim_config(const DeviceSection& section, sim::DeviceConfig config) {
  config.devices = static_cast<int>(section.count);
  config.capacity = section.capacity.value_or(kUnlimited);
  config.clock = section.clock == train::SimClock::kVirtual ? sim::Clock::kVirtual : sim::Clock::kReal;
  config.d2h_gbps = gb_per_s(section.d2h_per_s);
  config.h2d_gbps = gb_per_s(section.h2d_per_s);
  config.latency_ns = static_cast<double>(section.latency_ns);
  config.gflops = section.gflops;
  config.hbm_gbps = gb_per_s(section.hbm_per_s);
  config.launch_ns = static_cast<double>(section.launch_ns);
  config.hazard_check = section.hazard_check;
  return config;
}

OpenDevice open_sim(const DeviceSection& section, trace::Recorder* recorder) {
  sim::Control& control = sim::load();
  control.configure(sim_config(section, control.config()));
  device::set_host_task_launcher(c10::kPrivateUse1, [&control](const device::Stream& stream, HostTask task) {
    control.run_on_stream(stream.unwrap().device_index(), stream.unwrap().id(), std::move(task));
  });
  const bool is_virtual = section.clock == train::SimClock::kVirtual;
  if (is_virtual) {
    device::set_clock(c10::kPrivateUse1, [&control](c10::DeviceIndex index) { return control.host_time_ns(index); });
    // One recorder, one clock: on the real clock the simulator's own times do not belong in it.
    control.set_recorder(recorder);
  } else if (recorder != nullptr) {
    log_warning("log.trace: kernels and copies are recorded on device.clock: virtual alone");
  }
  return {.device = c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(section.index)),
          .has_clock = is_virtual};
}

}  // namespace

OpenDevice open_device(const DeviceSection& section, trace::Recorder* recorder) {
  switch (section.type) {
    case DeviceKind::kCpu:
      return {.device = c10::kCPU};
    case DeviceKind::kSim:
      return open_sim(section, recorder);
    case DeviceKind::kCuda:
      break;
  }
  // hasCUDA() would be false as well where there is only no device.
  NEAP_CHECK(at::globalContext().hasCUDART(), "[device.type] expected cpu or sim: this PyTorch (", TORCH_VERSION,
             ") was built without CUDA; found cuda");
  const int64_t count = at::detail::getCUDAHooks().deviceCount();
  NEAP_CHECK(count > 0,
             "[device.type] expected cpu or sim, as no CUDA device is to be found; found cuda; is the driver "
             "loaded, and does CUDA_VISIBLE_DEVICES leave one?");
  NEAP_CHECK(section.index < count, "[device.index] expected less than the number of CUDA devices, which is ", count,
             "; found ", section.index);
  return {.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(section.index))};
}

std::function<int64_t()> trace_clock(const DeviceSection& section) {
  if (section.type != DeviceKind::kSim || section.clock != train::SimClock::kVirtual) return {};
  return [device = c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(section.index))] {
    return device::Device::of(device).now_ns();
  };
}

bool report_hazards(const DeviceSection& section) {
  if (section.type != DeviceKind::kSim || !section.hazard_check) return false;
  const std::vector<std::string> hazards = sim::load().take_hazards();
  constexpr size_t kShown = 5;  // one mistake repeats in every step
  for (size_t i = 0; i < std::min(hazards.size(), kShown); ++i) log_error("hazard: ", hazards[i]);
  if (hazards.size() > kShown) log_error("hazard: ", hazards.size() - kShown, " more, or as many as are kept");
  return !hazards.empty();
}

}  // namespace neap::cli
