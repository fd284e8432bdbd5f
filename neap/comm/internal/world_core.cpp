// torch-free
#include "neap/comm/internal/world_core.h"

#include <algorithm>

namespace neap::comm::internal {
namespace {

std::exception_ptr make_error(FailureKind kind, const std::string& text) {
  return kind == FailureKind::kMismatch ? std::make_exception_ptr(Mismatch(text))
                                        : std::make_exception_ptr(RankFailure(text));
}

}  // namespace

void WorldCore::fail(FailureKind kind, const std::string& text) noexcept {
  if (!failed()) {
    // Published before the links are cut: a peer that notices the cut then finds the reason.
    const std::string first = fabric_->publish_failure(static_cast<char>(kind) + text);
    MutexLock lock(mutex_);
    if (first_.empty()) first_ = first;
    failed_.store(true, std::memory_order_release);
  }
  MutexLock lock(mutex_);
  for (Breakable* link : links_) link->abort();
}

std::exception_ptr WorldCore::failure(const std::string& place, FailureKind own_kind, const std::string& own) const {
  MutexLock lock(mutex_);
  const auto kind = static_cast<FailureKind>(first_.front());
  const std::string first = first_.substr(1);
  if (!own.empty() && first.starts_with(own)) return make_error(own_kind, "[comm] " + first);
  if (!own.empty() && own_kind == FailureKind::kMismatch) return make_error(own_kind, "[comm] " + own);
  return make_error(kind, "[comm] " + place + " was ended by an earlier failure: " + first);
}

void WorldCore::add(Breakable* link) {
  MutexLock lock(mutex_);
  links_.push_back(link);
  if (failed()) link->abort();
}

void WorldCore::remove(Breakable* link) {
  MutexLock lock(mutex_);
  std::erase(links_, link);
}

}  // namespace neap::comm::internal
