// torch-free
#include "neap/base/mutex.h"

#include <atomic>

namespace neap {
namespace {

constinit std::atomic<const WaitHooks*> g_hooks = nullptr;

}  // namespace

void set_wait_hooks(const WaitHooks* hooks) noexcept { g_hooks.store(hooks, std::memory_order_release); }

namespace internal {

Waiting::Waiting() noexcept
    : hooks_(g_hooks.load(std::memory_order_acquire)), released_(hooks_ == nullptr ? nullptr : hooks_->release()) {}

Waiting::~Waiting() {
  if (released_ != nullptr) hooks_->retake(released_);
}

}  // namespace internal
}  // namespace neap
