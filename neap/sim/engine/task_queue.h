// torch-free
// The real side of a stream: a first-in first-out queue and the thread that works it off.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "neap/base/mutex.h"
#include "neap/sim/engine/event.h"

namespace neap::sim {

struct Task {
  std::function<void()> work = {};                 // a copy, including whatever must follow it
  std::shared_ptr<Recording> record = {};          // or: finish this
  std::shared_ptr<const Recording> wait_for = {};  // or: wait for this
};

// push() is called by one thread at a time (the Engine's lock); the rest by any.
class TaskQueue {
 public:
  TaskQueue() = default;
  ~TaskQueue() { stop(); }
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // Starts the worker when there is none yet; true when it did. REQUIRES: not stopped.
  bool push(Task task) NEAP_EXCLUDES(mutex_);
  // Nothing queued, nothing running and no failure waiting to be told. What the tasks wrote is visible to the caller.
  bool idle() const NEAP_EXCLUDES(mutex_);
  // False when the timeout passed first.
  bool wait_idle(std::chrono::nanoseconds timeout) NEAP_EXCLUDES(mutex_);
  // Throws the first exception of a task since the last call.
  void rethrow_failure() NEAP_EXCLUDES(mutex_);
  // Works off what is queued and joins the thread. Idempotent.
  void stop() noexcept NEAP_EXCLUDES(mutex_);

 private:
  void run() NEAP_EXCLUDES(mutex_);

  mutable Mutex mutex_;
  CondVar work_;
  CondVar idle_;
  std::deque<Task> tasks_ NEAP_GUARDED_BY(mutex_);
  bool stopping_ NEAP_GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ NEAP_GUARDED_BY(mutex_);
  // Queued and running tasks, and one more while a failure waits. Changed under mutex_; read without for a quick
  // idle().
  std::atomic<int> outstanding_{0};
  std::thread worker_;  // touched by push() and stop() only
};

}  // namespace neap::sim
