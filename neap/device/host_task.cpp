#include "neap/device/host_task.h"

#include <array>
#include <memory>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/mutex.h"
#include "neap/device/device.h"

namespace neap::device {
namespace {

struct Launchers {
  Mutex mutex;
  std::array<std::shared_ptr<const HostTaskLauncher>, internal::kTypes> of_type NEAP_GUARDED_BY(mutex);
};

Launchers& launchers() {
  static auto* all = new Launchers;
  return *all;
}

std::shared_ptr<const HostTaskLauncher> find(c10::DeviceType type) {
  auto& all = launchers();
  MutexLock lock(all.mutex);
  return all.of_type[static_cast<size_t>(type)];
}

}  // namespace

void set_host_task_launcher(c10::DeviceType type, HostTaskLauncher launcher) {
  auto& all = launchers();
  MutexLock lock(all.mutex);
  all.of_type[static_cast<size_t>(type)] =
      launcher ? std::make_shared<const HostTaskLauncher>(std::move(launcher)) : nullptr;
}

bool has_host_task_launcher(c10::DeviceType type) { return find(type) != nullptr; }

void launch_host_task(const Stream& stream, HostTask task) {
  if (!stream.device().asynchronous()) return task.work();
  const auto type = stream.device().c10_device().type();
  const auto launcher = find(type);
  NEAP_CHECK(launcher != nullptr, "[device] '", task.what,
             "' expected a device type whose streams run host functions; ", type,
             " has no launcher for them; set one with set_host_task_launcher()");
  (*launcher)(stream, std::move(task));
}

}  // namespace neap::device
