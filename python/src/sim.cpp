// neaptide._C.sim: the simulated device, for neaptide/sim.py.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <pybind11/stl.h>

#include <exception>
#include <thread>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/device/device.h"
#include "neap/device/host_task.h"
#include "neap/sim/control.h"
#include "neap/sim/loader.h"
#include "neap/sim/settings.h"
#include "python/src/bind.h"

namespace neap::python {
namespace {

// As the `neap` command does it: the engine's times are the device's own.
void load() {
  sim::Control& control = sim::load();
  device::set_host_task_launcher(c10::kPrivateUse1, [&control](const device::Stream& stream, HostTask task) {
    control.run_on_stream(stream.unwrap().device_index(), stream.unwrap().id(), std::move(task));
  });
  device::set_clock(c10::kPrivateUse1, [&control](c10::DeviceIndex index) { return control.host_time_ns(index); });
}

void configure(const std::vector<std::pair<std::string, std::string>>& settings) {
  sim::DeviceConfig config = sim::load().config();
  for (const auto& [key, value] : settings) sim::apply_setting(config, key, value, "neaptide.sim");
  sim::load().configure(config);
}

// Autograd's thread of each device lets go of all passes that have returned. It does so when it likes; what a pass
// remembers is Python's in part, and a thread that wants an interpreter which has ended takes the process with it. A
// thread's next pass begins when it has let go of the one before; this one comes from a thread without Python's things.
void settle_backward() {
  const int devices = sim::load().config().devices;
  std::thread([devices] {
    try {
      for (int device = 0; device < devices; ++device) {
        if (sim::load().memory(device).allocations == 0) continue;
        const c10::Device place(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
        const at::Tensor leaf = at::ones({}, place).set_requires_grad(true);
        leaf.neg().backward();
      }
    } catch (const std::exception& error) {
      log_info("[neaptide.sim] the end of backward could not be waited for: ", error.what());
    }
  }).join();
}

py::dict to_dict(const sim::MemoryStats& stats) {
  using namespace py::literals;
  return py::dict("current"_a = stats.current, "peak"_a = stats.peak, "requested"_a = stats.requested,
                  "requested_peak"_a = stats.requested_peak, "live_blocks"_a = stats.live_blocks,
                  "allocations"_a = stats.allocations, "frees"_a = stats.frees, "out_of_memory"_a = stats.out_of_memory,
                  "capacity"_a = stats.capacity);
}

py::dict to_dict(const sim::LinkCounters& link) {
  using namespace py::literals;
  return py::dict("copies"_a = link.copies, "bytes"_a = link.bytes, "busy_ns"_a = link.busy_ns);
}

py::dict to_dict(const sim::Counters& counters) {
  using namespace py::literals;
  return py::dict("h2d"_a = to_dict(counters.h2d), "d2h"_a = to_dict(counters.d2h), "peer"_a = to_dict(counters.peer),
                  "kernels"_a = counters.kernels, "kernel_busy_ns"_a = counters.kernel_busy_ns,
                  "stall_ns"_a = counters.stall_ns, "launch_bound_ns"_a = counters.launch_bound_ns,
                  "host_wait_ns"_a = counters.host_wait_ns, "host_waits"_a = counters.host_waits,
                  "memory_waits"_a = counters.memory_waits, "threads"_a = counters.threads);
}

}  // namespace

void bind_sim(py::module_& module) {
  py::module_ sim = module.def_submodule("sim");
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  sim.def("load", &load, unlocked);
  sim.def("settle_backward", &settle_backward, unlocked);
  sim.def("configure", &configure, py::arg("settings"), unlocked);
  sim.def(
      "device_count", [] { return sim::load().config().devices; }, unlocked);
  sim.def(
      "memory", [](int device) { return to_dict(sim::load().memory(device)); }, py::arg("device"));
  sim.def("pinned_memory", [] { return to_dict(sim::load().pinned_memory()); });
  sim.def(
      "counters", [](int device) { return to_dict(sim::load().counters(device)); }, py::arg("device"));
  sim.def(
      "reset_counters", [](int device) { sim::load().reset_counters(device); }, py::arg("device"), unlocked);
  sim.def(
      "reset_peak", [](int device) { sim::load().reset_peak(device); }, py::arg("device"), unlocked);
  sim.def(
      "host_time_ns", [](int device) { return sim::load().host_time_ns(device); }, py::arg("device"), unlocked);
  sim.def(
      "take_hazards", [] { return sim::load().take_hazards(); }, unlocked);
  sim.def(
      "default_generator",
      [](int device) {
        return at::globalContext().defaultGenerator(
            c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)));
      },
      py::arg("device"));
}

}  // namespace neap::python
