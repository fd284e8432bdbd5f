// torch-free
// A hash table of objects that carry their own links and hash: no memory per member, and neighbours in a bucket are
// told apart without looking at their keys. Not thread-safe.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "neap/base/error.h"

namespace neap::offload {

template <class T>
struct TableLink {
  T* next = nullptr;
  size_t hash = 0;
};

// `link` is T's member for this table.
template <class T, TableLink<T> T::*link>
class StorageTable {
 public:
  // Room for so many members without growing.
  void reserve(size_t members) {
    if (members > buckets_.size()) grow(members);
  }

  // REQUIRES: the item is in no table.
  void insert(T& item, size_t hash) {
    reserve(++size_);
    (item.*link).hash = hash;
    chain(item);
  }

  void erase(T& item) {
    T** place = &bucket((item.*link).hash);
    while (*place != &item) {
      NEAP_ASSERT(*place != nullptr, "not in the table");
      place = &((*place)->*link).next;
    }
    *place = std::exchange((item.*link).next, nullptr);
    --size_;
  }

  // The member with this hash for which `matches` holds, or null.
  template <class Matches>
  T* find(size_t hash, Matches matches) const {
    if (buckets_.empty()) return nullptr;
    for (T* item = buckets_[hash & (buckets_.size() - 1)]; item != nullptr; item = (item->*link).next) {
      if ((item->*link).hash == hash && matches(*item)) return item;
    }
    return nullptr;
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (T* item : buckets_) {
      for (; item != nullptr; item = (item->*link).next) visit(*item);
    }
  }

  size_t size() const { return size_; }
  size_t buckets() const { return buckets_.size(); }

 private:
  static constexpr size_t kFirst = 64;

  T*& bucket(size_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }

  void chain(T& item) {
    T*& first = bucket((item.*link).hash);
    (item.*link).next = std::exchange(first, &item);
  }

  void grow(size_t members) {
    size_t count = buckets_.empty() ? kFirst : buckets_.size();
    while (count < members) count *= 2;
    const std::vector<T*> old = std::exchange(buckets_, std::vector<T*>(count));
    for (T* item : old) {
      while (item != nullptr) chain(*std::exchange(item, (item->*link).next));
    }
  }

  std::vector<T*> buckets_;
  size_t size_ = 0;
};

}  // namespace neap::offload
