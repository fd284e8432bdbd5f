// torch-free
// Events with versions. Each record() makes a fresh Recording; who waits holds the recording that was current at that
// moment, so recording the event again neither releases a waiter early nor makes it wait longer.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "neap/sim/engine/types.h"
#include "neap/sim/engine/vector_clock.h"

namespace neap::sim {

// The submission side fills a recording before anybody else can see it; afterwards only completion changes.
// Thread-safe.
class Recording {
 public:
  Recording(int device_index, Nanoseconds at, VectorClock knowledge)
      : device(device_index), time(at), seen(std::move(knowledge)) {}

  const int device;
  const Nanoseconds time;  // virtual time at which the stream reaches it
  const VectorClock seen;  // what is ordered before it

  bool done() const { return done_.load(std::memory_order_acquire); }
  void finish();
  // The same while nobody else knows the recording yet. Its real time, too, only where somebody may ask for it.
  enum class RealTime { kNotAsked, kTaken };
  void finish_unseen(RealTime real_time);
  void wait() const;
  // False when the timeout passed first.
  bool wait_for(std::chrono::nanoseconds timeout) const;
  // Real time of completion. REQUIRES: done().
  std::chrono::steady_clock::time_point finished_at() const { return finished_at_; }

 private:
  std::atomic<bool> done_{false};
  std::chrono::steady_clock::time_point finished_at_{};
};

// A handle on the latest recording; none before the first record. Passed to Engine::record() and friends, which guard
// it.
class Event {
 public:
  Event() = default;

 private:
  friend class Engine;
  std::shared_ptr<const Recording> latest_;
};

}  // namespace neap::sim
