// torch-free
// A link between host and device, or device and device: when copies happen on the virtual clock (LinkSchedule), and how
// real copies are held or slowed down (LinkGate).
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>

#include "neap/base/mutex.h"
#include "neap/sim/engine/types.h"

namespace neap::sim {

// One copy at a time. A copy takes the first gap that is long enough after it is ready, so one that waits for its
// stream does not hold up a later one that could run now. Guarded by the Engine.
class LinkSchedule {
 public:
  // The start of a copy that is ready at `ready` and takes `duration`.
  Nanoseconds reserve(Nanoseconds ready, Nanoseconds duration);

 private:
  struct Gap {
    Nanoseconds begin, end;
  };
  static constexpr int kMaxGaps = 8;

  Nanoseconds end_ = 0;
  std::array<Gap, kMaxGaps> gaps_{};  // oldest first
  int num_gaps_ = 0;
};

// Thread-safe.
class LinkGate {
 public:
  // True when that changed anything.
  bool pause() NEAP_EXCLUDES(mutex_);
  bool resume() NEAP_EXCLUDES(mutex_);
  // Runs the copy once the link is open. With a duration, the link is held that long at least: one such copy at a time.
  // False, without having run it, when the link stayed paused for the whole of `patience` (zero: wait for ever).
  bool pass(const std::function<void()>& copy, std::chrono::nanoseconds duration, std::chrono::nanoseconds patience)
      NEAP_EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  CondVar changed_;
  bool paused_ NEAP_GUARDED_BY(mutex_) = false;
  bool busy_ NEAP_GUARDED_BY(mutex_) = false;
};

}  // namespace neap::sim
