// torch-free
// What the groups of one rank share: the way to the other ranks, the watchdog, and the failure that ends them all.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "neap/base/mutex.h"
#include "neap/comm/failure.h"
#include "neap/comm/internal/fabric.h"
#include "neap/comm/internal/watchdog.h"
#include "neap/comm/world.h"

namespace neap::comm::internal {

enum class FailureKind : char { kRank = 'R', kMismatch = 'M' };

class WorldCore {
 public:
  WorldCore(std::unique_ptr<Fabric> fabric, WorldOptions options)
      : fabric_(std::move(fabric)), options_(std::move(options)) {}

  Fabric& fabric() { return *fabric_; }
  Watchdog& watchdog() { return watchdog_; }
  const WorldOptions& options() const { return options_; }

  // `text` says what this rank noticed. Tells the other ranks, unless one of them was first; either way the first text
  // of the world is remembered, and all links of this rank are cut. Any thread.
  void fail(FailureKind kind, const std::string& text) noexcept NEAP_EXCLUDES(mutex_);
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  // The error for a collective at `place` that has ended or cannot start. `own`: what it noticed itself, if anything.
  // REQUIRES: failed()
  std::exception_ptr failure(const std::string& place, FailureKind own_kind, const std::string& own) const
      NEAP_EXCLUDES(mutex_);

  // The links to cut on failure. One is added when it is made and removed before it goes.
  void add(Breakable* link) NEAP_EXCLUDES(mutex_);
  void remove(Breakable* link) NEAP_EXCLUDES(mutex_);

 private:
  const std::unique_ptr<Fabric> fabric_;
  const WorldOptions options_;
  std::atomic<bool> failed_{false};
  mutable Mutex mutex_;
  std::string first_ NEAP_GUARDED_BY(mutex_);  // kind and text of the world's first failure
  std::vector<Breakable*> links_ NEAP_GUARDED_BY(mutex_);
  Watchdog watchdog_;  // last: its thread uses the rest
};

}  // namespace neap::comm::internal
