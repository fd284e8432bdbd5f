// torch-free
#include "neap/sim/engine/task_queue.h"

#include <utility>

namespace neap::sim {

bool TaskQueue::push(Task task) {
  bool started = false;
  if (!worker_.joinable()) {
    // Before the task is queued: when no thread can be had, nothing is left half done.
    worker_ = std::thread([this] { run(); });
    started = true;
  }
  {
    MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
    outstanding_.fetch_add(1, std::memory_order_relaxed);
  }
  work_.notify_one();
  return started;
}

bool TaskQueue::idle() const {
  if (outstanding_.load(std::memory_order_acquire) == 0) return true;
  // A worker finishes its task and lowers the count under the lock. Whoever has seen that task's event done must not be
  // told that the stream is still busy with it.
  MutexLock lock(mutex_);
  return outstanding_.load(std::memory_order_relaxed) == 0;
}

bool TaskQueue::wait_idle(std::chrono::nanoseconds timeout) {
  MutexLock lock(mutex_);
  return idle_.wait_for(mutex_, timeout, [this]() NEAP_REQUIRES(mutex_) {
    return outstanding_.load(std::memory_order_relaxed) == (failure_ ? 1 : 0);
  });
}

void TaskQueue::rethrow_failure() {
  std::exception_ptr failure;
  {
    MutexLock lock(mutex_);
    if (!failure_) return;
    failure = std::exchange(failure_, nullptr);
    outstanding_.fetch_sub(1, std::memory_order_release);
  }
  std::rethrow_exception(failure);
}

void TaskQueue::stop() noexcept {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_one();
  if (worker_.joinable()) worker_.join();
}

void TaskQueue::run() {
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      work_.wait(mutex_, [this]() NEAP_REQUIRES(mutex_) { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    std::exception_ptr failure;
    if (task.wait_for) task.wait_for->wait();
    if (task.work) {
      try {
        task.work();
      } catch (...) {
        failure = std::current_exception();
      }
      task.work = nullptr;  // its captures go before the stream counts as done
    }
    MutexLock lock(mutex_);
    if (task.record) task.record->finish();
    if (failure && !failure_) {
      failure_ = failure;
      outstanding_.fetch_add(1, std::memory_order_relaxed);
    }
    outstanding_.fetch_sub(1, std::memory_order_release);
    if (tasks_.empty()) idle_.notify_all();
  }
}

}  // namespace neap::sim
