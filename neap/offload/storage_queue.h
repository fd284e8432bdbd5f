// torch-free
// A queue of objects that carry their own links: joining, and leaving from any place, take constant time and no memory,
// however long the queue. Counts the bytes that wait in it. Not thread-safe.
#pragma once

#include "neap/base/bytes.h"
#include "neap/base/error.h"

namespace neap::offload {

template <class T>
struct QueueLink {
  T* before = nullptr;
  T* after = nullptr;
  bool queued = false;
};

// `link` is T's member for this queue; T has `Bytes size() const`, which does not change while it waits.
template <class T, QueueLink<T> T::*link>
class StorageQueue {
 public:
  StorageQueue() = default;
  StorageQueue(const StorageQueue&) = delete;
  StorageQueue& operator=(const StorageQueue&) = delete;

  static bool contains(const T& item) { return (item.*link).queued; }

  void push(T& item) {
    NEAP_ASSERT(!contains(item));
    item.*link = {last_, nullptr, true};
    (last_ == nullptr ? first_ : (last_->*link).after) = &item;
    last_ = &item;
    bytes_ += item.size();
  }

  // Does nothing when the item does not wait.
  void remove(T& item) {
    if (!contains(item)) return;
    QueueLink<T>& ends = item.*link;
    (ends.before == nullptr ? first_ : (ends.before->*link).after) = ends.after;
    (ends.after == nullptr ? last_ : (ends.after->*link).before) = ends.before;
    ends = {};
    bytes_ -= item.size();
  }

  // The one that has waited longest, or null.
  T* front() const { return first_; }
  Bytes bytes() const { return bytes_; }

 private:
  T* first_ = nullptr;
  T* last_ = nullptr;
  Bytes bytes_;
};

}  // namespace neap::offload
