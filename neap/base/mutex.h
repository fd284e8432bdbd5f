// torch-free
// Mutex, its lock and its condition variable with clang's thread-safety annotations.
//
// libstdc++'s std::mutex carries no annotations, so clang cannot check code that uses it; these thin wrappers can be
// checked (make lint). Use: `std::deque<Task> queue_ NEAP_GUARDED_BY(mutex_);`
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

class NEAP_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() NEAP_ANNOTATE(acquire_capability()) { mutex_.lock(); }
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
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock, ready);
    lock.release();
  }
  // False when the deadline passed first.
  template <class Predicate>
  bool wait_for(Mutex& mutex, std::chrono::nanoseconds timeout, Predicate ready) NEAP_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool held = condition_.wait_for(lock, timeout, ready);
    lock.release();
    return held;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace neap
