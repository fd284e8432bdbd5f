// torch-free
// Mutex, its lock and its condition variable with clang's thread-safety annotations.
//
// libstdc++'s std::mutex carries no annotations, so clang cannot check code that uses it; these thin wrappers can be
// checked (make lint). Use: `std::deque<Task> queue_ NEAP_GUARDED_BY(mutex_);`
//
// In a process with an interpreter, whoever holds a Mutex may need the interpreter's lock (the last reference to a
// tensor that has a Python object takes it). So nobody may wait for a Mutex while holding that lock, or the two would
// wait for each other: WaitHooks lets go of it around every wait. A Mutex that is free costs nothing for this.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define NEAP_ANNOTATE(x) __attribute__((x))
#else
#define NEAP_ANNOTATE(x)
#endif
#define NEAP_GUARDED_BY(x) NEAP_ANNOTATE(guarded_by(x))
#define NEAP_REQUIRES(...) NEAP_ANNOTATE(requires_capability(__VA_ARGS__))
#define NEAP_EXCLUDES(...) NEAP_ANNOTATE(locks_excluded(__VA_ARGS__))

namespace neap {

// What a thread gives up before it waits here and takes again afterwards; by then it holds the Mutex.
struct WaitHooks {
  void* (*release)();              // null if the thread had nothing to give up
  void (*retake)(void* released);  // what release() returned, unless null
};
// Process-wide; null for none. REQUIRES: lives for ever, and nobody waits meanwhile.
void set_wait_hooks(const WaitHooks* hooks) noexcept;

namespace internal {

// Applies the hooks while it lives.
class Waiting {
 public:
  Waiting() noexcept;
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const WaitHooks* hooks_;
  void* released_;
};

}  // namespace internal

class NEAP_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() NEAP_ANNOTATE(acquire_capability()) {
    if (mutex_.try_lock()) return;
    const internal::Waiting waiting;
    mutex_.lock();
  }
  void unlock() NEAP_ANNOTATE(release_capability()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class NEAP_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) NEAP_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() NEAP_ANNOTATE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits release and retake the Mutex that the caller holds. Always with a predicate: wake-ups may be spurious.
class CondVar {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  template <class Predicate>
  void wait(Mutex& mutex, Predicate ready) NEAP_REQUIRES(mutex) {
    const internal::Waiting waiting;
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock, ready);
    lock.release();
  }
  // False when the deadline passed first.
  template <class Predicate>
  bool wait_for(Mutex& mutex, std::chrono::nanoseconds timeout, Predicate ready) NEAP_REQUIRES(mutex) {
    const internal::Waiting waiting;
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool held = condition_.wait_for(lock, timeout, ready);
    lock.release();
    return held;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace neap
