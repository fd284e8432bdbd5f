// torch-free
#include "neap/comm/internal/worker.h"

#include <utility>

namespace neap::comm::internal {

Worker::~Worker() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::push(std::function<void()> work) {
  MutexLock lock(mutex_);
  queue_.push_back(std::move(work));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_one();
}

void Worker::run() {
  for (;;) {
    std::function<void()> work;
    {
      MutexLock lock(mutex_);
      changed_.wait(mutex_, [&]() NEAP_REQUIRES(mutex_) { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

}  // namespace neap::comm::internal
