// The driver's events of one device, kept for reuse. Private to neap/device.
//
// An idle node keeps its c10::Event, which may be recorded again even while streams still wait for its former
// recording: each wait is for the version it saw. Thread-safe; the pool is never destroyed.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>

#include "neap/base/mutex.h"

namespace neap::device::internal {

class EventPool;

struct EventNode {
  EventNode(EventPool& pool, c10::DeviceType type, bool with_time)
      : home(pool),
        timed(with_time),
        event(type, with_time ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {}

  EventPool& home;
  const bool timed;
  std::atomic<int32_t> references = 1;
  EventNode* next_idle = nullptr;
  c10::Event event;  // written by record() before the node is shared, only read afterwards
};

class EventPool {
 public:
  explicit EventPool(c10::DeviceType type) : type_(type) {}

  // A node that is recorded on `stream`, with one reference.
  EventNode* record(const c10::Stream& stream, bool timed);
  void put_back(EventNode* node) noexcept;
  // Events the driver was asked for so far: constant in a steady run.
  [[nodiscard]] int64_t created() const noexcept { return created_.load(std::memory_order_relaxed); }

 private:
  EventNode* take_idle(bool timed);

  const c10::DeviceType type_;
  std::atomic<int64_t> created_ = 0;
  Mutex mutex_;
  EventNode* idle_[2] NEAP_GUARDED_BY(mutex_) = {nullptr, nullptr};  // [timed]
};

}  // namespace neap::device::internal
