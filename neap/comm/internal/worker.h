// torch-free
// A thread that runs functions in the order they came; started when the first comes. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "neap/base/mutex.h"

namespace neap::comm::internal {

class Worker {
 public:
  Worker() = default;
  ~Worker();  // runs what is queued
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `work` must not throw.
  void push(std::function<void()> work) NEAP_EXCLUDES(mutex_);

 private:
  void run() NEAP_EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ NEAP_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> queue_ NEAP_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace neap::comm::internal
