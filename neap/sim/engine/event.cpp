// torch-free
#include "neap/sim/engine/event.h"

namespace neap::sim {

void Recording::finish() {
  {
    MutexLock lock(mutex_);
    finished_at_ = std::chrono::steady_clock::now();
    done_.store(true, std::memory_order_release);
  }
  finished_.notify_all();
}

void Recording::wait() const {
  if (done()) return;
  MutexLock lock(mutex_);
  finished_.wait(mutex_, [this] { return done(); });
}

bool Recording::wait_for(std::chrono::nanoseconds timeout) const {
  if (done()) return true;
  MutexLock lock(mutex_);
  return finished_.wait_for(mutex_, timeout, [this] { return done(); });
}

}  // namespace neap::sim
