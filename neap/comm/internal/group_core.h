// What a Group does behind its tensors: runs collectives one after another, and turns what goes wrong into errors that
// every rank throws.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/host_task.h"
#include "neap/base/mutex.h"
#include "neap/comm/group.h"
#include "neap/comm/internal/device_group.h"
#include "neap/comm/internal/exchange.h"
#include "neap/comm/internal/work_state.h"
#include "neap/comm/internal/worker.h"
#include "neap/comm/internal/world_core.h"

namespace neap::comm::internal {

// One collective, resolved to addresses. It runs later, on another thread.
struct Call {
  Collective kind = Collective::kBarrier;
  CallHeader header;
  std::string unit;
  Bytes bytes;  // of the full buffer
  Bytes copied;
  std::function<void(Exchange&)> body;                         // after the ranks have agreed on the header
  std::function<void(DeviceGroup&, bool ordered)> on_library;  // instead of it, where the host cannot reach the memory
  std::vector<c10::Storage> memory;                            // what it reads and writes
  std::vector<HostTask::Range> ranges;                         // and where, for an asynchronous device
  Bytes wire_bytes;                                            // what leaves this rank
  int latencies = 1;
};

class GroupCore {
 public:
  // Waits for the other members. Throws LinkLost when they do not come.
  GroupCore(std::shared_ptr<WorldCore> world, std::string name, std::vector<int> ranks);
  ~GroupCore();  // waits for what runs
  GroupCore(const GroupCore&) = delete;
  GroupCore& operator=(const GroupCore&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<int>& ranks() const { return ranks_; }

  // Throws what has ended the world, if anything has.
  void check_alive(Collective kind, std::string_view unit) const;
  // Starts it on `device`'s collective stream, or on this group's thread.
  Work start(Call call, c10::Device on);
  // Of one that is started, or of a group of one rank's that is done already.
  void count(const Call& call) NEAP_EXCLUDES(mutex_);
  [[nodiscard]] Counters counters() const NEAP_EXCLUDES(mutex_);
  void wait_idle() NEAP_EXCLUDES(mutex_);
  [[nodiscard]] bool ordered() const { return world_->options().ordered; }

 private:
  // The messages of the collectives that run on one thread, one after another. Those over CPU tensors and those over a
  // device's are not ordered with each other, so they do not share connections.
  struct Lane {
    const char* suffix = "";
    std::unique_ptr<Transport> transport;  // made at the first use
    Progress progress;
    std::vector<std::byte> scratch;
    uint64_t number = 0;  // of collectives started
  };

  Work run_later(Call call, device::Device& device);
  Work start_on_library(Call call, device::Device& device);
  void run(Call& call, Lane& lane, WorkState& state) noexcept;
  void end_one() noexcept NEAP_EXCLUDES(mutex_);
  std::exception_ptr attempt(Call& call, Lane& lane) noexcept;
  void converse(Call& call, Lane& lane);
  void connect(Lane& lane);
  std::string meeting(const char* suffix) const;
  void agree(Exchange& exchange, const Call& call) const;
  // "rank 1, all_gather of 'layers.3' in group 'shard 0' (ranks 0, 1)"
  std::string place(Collective kind, std::string_view unit) const;
  std::string late(const Lane& lane) const;
  // On the host's clock, when it is over; on one of the device's own, when it starts.
  void trace_span(const Call& call, int64_t begin_ns) const;
  void trace_start(const Call& call, bool on_device, HostTask& task) const;

  const std::shared_ptr<WorldCore> world_;
  const std::string name_;
  const std::vector<int> ranks_;
  const int rank_;
  Lane host_lane_, device_lane_;
  std::unique_ptr<DeviceGroup> library_;  // made at the first use

  mutable Mutex mutex_;
  CondVar idle_;
  int outstanding_ NEAP_GUARDED_BY(mutex_) = 0;
  Counters counters_ NEAP_GUARDED_BY(mutex_);
  const std::shared_ptr<std::atomic<int64_t>> host_wait_ns_ = std::make_shared<std::atomic<int64_t>>(0);
  Worker worker_;
};

}  // namespace neap::comm::internal
