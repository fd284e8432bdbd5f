// torch-free
// Items that are made before they are asked for: one thread makes number first, first + 1, … and waits when `depth` of
// them are ready.
//
//   ReadAhead<Batch> ahead([&](int64_t i) { return read_batch(i); }, first, 2);
//   Batch batch = ahead.next();
//
// next() is for one thread at a time. The destructor ends the maker after the item it is at, whatever is left.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/mutex.h"

namespace neap::train {

template <class Item>
class ReadAhead {
 public:
  // `make` runs on the other thread, one call at a time, and must outlive nothing: it is kept here.
  // REQUIRES: depth >= 1.
  ReadAhead(std::function<Item(int64_t)> make, int64_t first, size_t depth)
      : make_(std::move(make)), depth_(depth), thread_([this, first] { run(first); }) {}
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  ~ReadAhead() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    room_.notify_one();
    thread_.join();
  }

  // The next item, in order. What `make` threw for it is thrown here when its turn comes, and again by every later
  // call.
  Item next() {
    const auto begin = std::chrono::steady_clock::now();
    MutexLock lock(mutex_);
    ready_.wait(mutex_, [this]() NEAP_REQUIRES(mutex_) { return !items_.empty() || error_; });
    waited_ += std::chrono::steady_clock::now() - begin;
    if (items_.empty()) std::rethrow_exception(error_);
    Item item = std::move(items_.front());
    items_.pop_front();
    room_.notify_one();
    return item;
  }

  // What next() has waited for items so far, all calls together. For the caller of next().
  std::chrono::nanoseconds waited() const noexcept { return waited_; }

 private:
  void run(int64_t index) {
    while (wait_for_room()) {
      try {
        add(make_(index++));
      } catch (...) {
        const MutexLock lock(mutex_);
        error_ = std::current_exception();
        ready_.notify_one();
        return;
      }
    }
  }

  bool wait_for_room() {
    const MutexLock lock(mutex_);
    room_.wait(mutex_, [this]() NEAP_REQUIRES(mutex_) { return stopping_ || items_.size() < depth_; });
    return !stopping_;
  }

  void add(Item item) {
    const MutexLock lock(mutex_);
    items_.push_back(std::move(item));
    ready_.notify_one();
  }

  const std::function<Item(int64_t)> make_;
  const size_t depth_;
  std::chrono::nanoseconds waited_{};
  Mutex mutex_;
  CondVar room_, ready_;
  std::deque<Item> items_ NEAP_GUARDED_BY(mutex_);
  std::exception_ptr error_ NEAP_GUARDED_BY(mutex_);
  bool stopping_ NEAP_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace neap::train
