// The state that a Work shares with the thread that runs its collective.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "neap/base/mutex.h"
#include "neap/device/event.h"

namespace neap::device {
class Device;
class Stream;
}  // namespace neap::device

namespace neap::comm::internal {

class WorkState {
 public:
  // `device`: null for a CPU. `host_wait_ns` is added to while the host waits.
  WorkState(std::vector<c10::Storage> memory, device::Device* device,
            std::shared_ptr<std::atomic<int64_t>> host_wait_ns)
      : memory_(std::move(memory)), device_(device), host_wait_ns_(std::move(host_wait_ns)) {}
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  // The running side: the collective has ended, well or not. On a CPU the memory is let go before anyone is told, so
  // that their bytes are gone when wait() returns.
  void finish(std::exception_ptr error) noexcept NEAP_EXCLUDES(mutex_);
  // Once enqueued on an asynchronous device; by the thread that owns the Work, before it has it.
  void set_end(device::Event end) { end_ = std::move(end); }
  // The same where nobody calls finish() when it is done: the event alone tells.
  void finish_with(device::Event end) noexcept NEAP_EXCLUDES(mutex_);

  // Work's own.
  void wait() NEAP_EXCLUDES(mutex_);
  void synchronize() NEAP_EXCLUDES(mutex_);
  bool done() const NEAP_EXCLUDES(mutex_);
  // The Work goes. If it was not waited for, the device's allocator is told who still uses the memory: here, on the
  // owner's thread, so that the memory is free at a point that does not depend on when the collective runs.
  void drop() noexcept;

 private:
  void block() NEAP_EXCLUDES(mutex_);
  void rethrow() NEAP_EXCLUDES(mutex_);

  // Storages, not tensors: a tensor may be the last to hold an autograd graph, which is not to end on another thread.
  std::vector<c10::Storage> memory_;  // CPU: of the running side until it is done; else of the owner
  device::Device* const device_;
  const std::shared_ptr<std::atomic<int64_t>> host_wait_ns_;
  device::Event end_;
  bool event_tells_ = false;

  mutable Mutex mutex_;
  CondVar changed_;
  bool done_ NEAP_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ NEAP_GUARDED_BY(mutex_);
};

}  // namespace neap::comm::internal
