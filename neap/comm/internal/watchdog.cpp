// torch-free
#include "neap/comm/internal/watchdog.h"

#include <algorithm>

namespace neap::comm::internal {

Watchdog::~Watchdog() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Watchdog::Watch Watchdog::watch(std::chrono::nanoseconds limit, std::function<void()> expired) {
  MutexLock lock(mutex_);
  const uint64_t id = next_++;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
  entries_.emplace(id, Entry{deadline, std::move(expired)});
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (deadline < wakes_at_) {
    wakes_at_ = deadline;
    changed_.notify_all();
  }
  return Watch(*this, id);
}

void Watchdog::forget(uint64_t id) {
  MutexLock lock(mutex_);
  entries_.erase(id);
  changed_.wait(mutex_, [&]() NEAP_REQUIRES(mutex_) { return running_ != id; });
}

std::function<void()> Watchdog::next_expired() {
  MutexLock lock(mutex_);
  running_ = 0;
  changed_.notify_all();
  for (;;) {
    const auto earliest = std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
      return a.second.deadline < b.second.deadline;
    });
    wakes_at_ = earliest == entries_.end() ? Clock::time_point::max() : earliest->second.deadline;
    const auto slept_until = wakes_at_;
    const auto woken = [&]() NEAP_REQUIRES(mutex_) { return stopping_ || wakes_at_ < slept_until; };
    if (stopping_) return {};
    if (slept_until == Clock::time_point::max()) {
      changed_.wait(mutex_, woken);
    } else if (const auto left = slept_until - Clock::now(); left > Clock::duration::zero()) {
      changed_.wait_for(mutex_, left, woken);
    } else {
      running_ = earliest->first;
      auto expired = std::move(earliest->second.expired);
      entries_.erase(earliest);
      return expired;
    }
  }
}

void Watchdog::run() {
  while (const auto expired = next_expired()) expired();
}

}  // namespace neap::comm::internal
