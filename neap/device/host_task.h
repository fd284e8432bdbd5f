// Work of the host in the order of a stream: a function that runs when everything enqueued before it is done, and that
// what is enqueued after it waits for. Collectives over device memory are such work.
//
// c10 has no such call, so each device type brings its own: set_host_task_launcher, as set_clock. A plain CPU needs
// none: its streams are always done, and the function runs before the call returns. Thread-safe.
#pragma once

#include <c10/core/DeviceType.h>

#include <functional>

#include "neap/base/host_task.h"
#include "neap/device/stream.h"

namespace neap::device {

using HostTaskLauncher = std::function<void(const Stream&, HostTask)>;

// An empty function takes it away again.
void set_host_task_launcher(c10::DeviceType type, HostTaskLauncher launcher);
[[nodiscard]] bool has_host_task_launcher(c10::DeviceType type);

// Returns before the work is done. The memory may be freed right after the call, in stream order as with any kernel.
// UserError when the device is asynchronous and its type has no launcher.
void launch_host_task(const Stream& stream, HostTask task);

}  // namespace neap::device
