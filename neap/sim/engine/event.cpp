// torch-free
#include "neap/sim/engine/event.h"

#include <array>
#include <cstdint>

#include "neap/base/mutex.h"

namespace neap::sim {
namespace {

// Where threads sleep until a recording is done. Few of the recordings that are made are ever slept for, so some share
// a place: it costs a waiter a look, and a recording nothing.
struct Bell {
  Mutex mutex;
  CondVar rung;
};

Bell& bell_of(const Recording* recording) {
  constexpr std::size_t kBells = 16;
  static auto& bells = *new std::array<Bell, kBells>;  // leaked: workers may outlive static objects
  return bells[(reinterpret_cast<uintptr_t>(recording) >> 6) % kBells];
}

}  // namespace

void Recording::finish() {
  Bell& bell = bell_of(this);
  {
    // Under the lock, or a waiter that has just looked would miss the bell.
    MutexLock lock(bell.mutex);
    finish_unseen(RealTime::kTaken);
  }
  bell.rung.notify_all();
}

void Recording::finish_unseen(RealTime real_time) {
  if (real_time == RealTime::kTaken) finished_at_ = std::chrono::steady_clock::now();
  done_.store(true, std::memory_order_release);
}

void Recording::wait() const {
  if (done()) return;
  Bell& bell = bell_of(this);
  MutexLock lock(bell.mutex);
  bell.rung.wait(bell.mutex, [this] { return done(); });
}

bool Recording::wait_for(std::chrono::nanoseconds timeout) const {
  if (done()) return true;
  Bell& bell = bell_of(this);
  MutexLock lock(bell.mutex);
  return bell.rung.wait_for(bell.mutex, timeout, [this] { return done(); });
}

}  // namespace neap::sim
