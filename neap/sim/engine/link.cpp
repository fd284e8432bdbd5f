// torch-free
#include "neap/sim/engine/link.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "neap/base/scope_exit.h"

namespace neap::sim {

Nanoseconds LinkSchedule::reserve(Nanoseconds ready, Nanoseconds duration) {
  for (int i = 0; i < num_gaps_; ++i) {
    Gap& gap = gaps_[i];
    const Nanoseconds start = std::max(ready, gap.begin);
    if (start + duration > gap.end) continue;
    // The part before the copy is given up: later copies are hardly ever ready earlier.
    gap.begin = start + duration;
    return start;
  }
  const Nanoseconds start = std::max(ready, end_);
  if (start > end_) {
    if (num_gaps_ == kMaxGaps) std::move(gaps_.begin() + 1, gaps_.end(), gaps_.begin()), --num_gaps_;
    gaps_[num_gaps_++] = {end_, start};
  }
  end_ = start + duration;
  return start;
}

bool LinkGate::pause() {
  MutexLock lock(mutex_);
  return !std::exchange(paused_, true);
}

bool LinkGate::resume() {
  bool was_paused = false;
  {
    MutexLock lock(mutex_);
    was_paused = std::exchange(paused_, false);
  }
  changed_.notify_all();
  return was_paused;
}

bool LinkGate::pass(const std::function<void()>& copy, std::chrono::nanoseconds duration,
                    std::chrono::nanoseconds patience) {
  const bool timed = duration.count() > 0;
  {
    MutexLock lock(mutex_);
    const auto open = [&]() NEAP_REQUIRES(mutex_) { return !paused_ && !(timed && busy_); };
    if (patience.count() == 0) {
      changed_.wait(mutex_, open);
    } else {
      while (!changed_.wait_for(mutex_, patience, open)) {
        if (paused_) return false;
      }
    }
    if (timed) busy_ = true;
  }
  ScopeExit leave([&] {
    if (!timed) return;
    {
      MutexLock lock(mutex_);
      busy_ = false;
    }
    changed_.notify_all();
  });
  const auto begin = std::chrono::steady_clock::now();
  copy();
  if (timed) std::this_thread::sleep_until(begin + duration);
  return true;
}

}  // namespace neap::sim
