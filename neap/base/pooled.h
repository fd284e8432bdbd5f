// torch-free
// Objects that are made and destroyed by the million: memory for them comes from a list of their own.
//
//   class PackedView final : public SavedVariableHooks, public Pooled<PackedView> { … };
//
// The general allocator keeps what is freed in bins that other sizes are cut from and joined in; with 10^5 objects
// alive beside a graph's nodes that costs more than the objects do. Here freed memory waits for the next object of the
// class. It stays with the process: as much as the most objects that were alive at once. Thread-safe; memory taken on
// one thread may come back on another.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include "neap/base/mutex.h"

namespace neap {
namespace internal {

template <std::size_t kSize>
class MemoryList {
 public:
  // Of the process, never destroyed: objects may outlive every static.
  static MemoryList& instance() {
    static MemoryList& list = *new MemoryList;
    return list;
  }

  void* take() NEAP_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (first_ == nullptr) grow();
    return std::exchange(first_, first_->next);
  }
  void give(void* memory) noexcept NEAP_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    first_ = new (memory) Link{first_};
  }

 private:
  struct Link {
    Link* next;
  };
  static_assert(kSize >= sizeof(Link));

  void grow() NEAP_REQUIRES(mutex_) {
    constexpr std::size_t kCount = 1 + 65536 / kSize;
    auto* bytes = static_cast<std::byte*>(::operator new(kCount* kSize));
    for (std::size_t i = kCount; i-- > 0;) first_ = new (bytes + i * kSize) Link{first_};
  }

  Mutex mutex_;
  Link* first_ NEAP_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace internal

#if defined(__SANITIZE_ADDRESS__)
template <class T>
class Pooled {};  // an address sanitizer sees only what the general allocator is told
#else
template <class T>
class Pooled {
 public:
  static void* operator new(std::size_t size) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    return size == sizeof(T) ? internal::MemoryList<sizeof(T)>::instance().take() : ::operator new(size);
  }
  static void operator delete(void* memory, std::size_t size) noexcept {
    if (size != sizeof(T)) return ::operator delete(memory);
    internal::MemoryList<sizeof(T)>::instance().give(memory);
  }
};
#endif

}  // namespace neap
