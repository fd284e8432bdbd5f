#include "neap/comm/work.h"

#include <chrono>
#include <utility>

#include "neap/comm/internal/work_state.h"
#include "neap/device/device.h"

namespace neap::comm {
namespace internal {

void WorkState::drop() noexcept {
  if (device_ == nullptr) return;
  for (const auto& storage : memory_) {
    try {
      device_->record_on_stream(storage.data_ptr(), device_->collective_stream());
    } catch (const std::exception&) {
      // A device that is in error: nothing is reused on it any more.
    }
  }
  memory_.clear();
}

void WorkState::finish(std::exception_ptr error) noexcept {
  if (device_ == nullptr) memory_.clear();
  MutexLock lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  changed_.notify_all();
}

void WorkState::finish_with(device::Event end) noexcept {
  end_ = std::move(end);
  event_tells_ = true;
  finish(nullptr);
}

bool WorkState::done() const {
  {
    MutexLock lock(mutex_);
    if (!done_) return false;
  }
  return !event_tells_ || end_.query();
}

void WorkState::rethrow() {
  MutexLock lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void WorkState::block() {
  const auto begin = std::chrono::steady_clock::now();
  {
    MutexLock lock(mutex_);
    // Ends within the timeout of the world: the watchdog sees to it.
    changed_.wait(mutex_, [&]() NEAP_REQUIRES(mutex_) { return done_; });
  }
  *host_wait_ns_ += (std::chrono::steady_clock::now() - begin) / std::chrono::nanoseconds(1);
}

void WorkState::wait() {
  if (device_ == nullptr) {
    if (!done()) block();
  } else {
    // From here on the current stream guards the memory, as it does for any kernel.
    device_->current_stream().wait(end_);
    memory_.clear();
  }
  rethrow();
}

void WorkState::synchronize() {
  if (!done()) block();
  if (device_ != nullptr) {
    end_.synchronize();
    memory_.clear();
  }
  rethrow();
}

}  // namespace internal

Work::Work() noexcept = default;
Work::Work(std::shared_ptr<internal::WorkState> state) noexcept : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}
Work::~Work() {
  if (state_ != nullptr) state_->drop();
}

void Work::wait() {
  if (state_ != nullptr) state_->wait();
}

void Work::synchronize() {
  if (state_ != nullptr) state_->synchronize();
}

bool Work::done() const { return state_ == nullptr || state_->done(); }

}  // namespace neap::comm
