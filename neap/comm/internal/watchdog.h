// torch-free
// Calls a function when something takes longer than it may. One thread, started at the first watch. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "neap/base/mutex.h"

namespace neap::comm::internal {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // Watches while it lives. When it is gone, the function neither runs nor will run.
  class Watch {
   public:
    Watch(Watchdog& dog, uint64_t id) : dog_(&dog), id_(id) {}
    ~Watch() { dog_->forget(id_); }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Watchdog* dog_;
    uint64_t id_;
  };

  Watchdog() = default;
  ~Watchdog();  // REQUIRES: no Watch lives
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // `expired` must not throw, nor destroy its own Watch.
  [[nodiscard]] Watch watch(std::chrono::nanoseconds limit, std::function<void()> expired) NEAP_EXCLUDES(mutex_);

 private:
  struct Entry {
    Clock::time_point deadline;
    std::function<void()> expired;
  };

  void forget(uint64_t id) NEAP_EXCLUDES(mutex_);
  void run() NEAP_EXCLUDES(mutex_);
  // Sleeps until a deadline has passed and returns that entry's function; empty when the dog is to stop.
  std::function<void()> next_expired() NEAP_EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  uint64_t next_ NEAP_GUARDED_BY(mutex_) = 1;
  uint64_t running_ NEAP_GUARDED_BY(mutex_) = 0;  // the entry whose function runs now
  // The thread sleeps until then; only an earlier deadline has to wake it. Limits are alike as a rule, so almost none
  // is.
  Clock::time_point wakes_at_ NEAP_GUARDED_BY(mutex_) = Clock::time_point::max();
  bool stopping_ NEAP_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, Entry> entries_ NEAP_GUARDED_BY(mutex_);  // a few: one per group that is busy
  std::thread thread_;
};

}  // namespace neap::comm::internal
