#include "neap/device/event.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <memory>

#include "neap/device/event_pool.h"

namespace neap::device {
namespace internal {

void retain(EventNode* node) noexcept {
  if (node != nullptr) node->references.fetch_add(1, std::memory_order_relaxed);
}

void release(EventNode* node) noexcept {
  // acq_rel: the thread that records the event again must see all uses by the others as past.
  if (node != nullptr && node->references.fetch_sub(1, std::memory_order_acq_rel) == 1) node->home.put_back(node);
}

EventNode* EventPool::record(const c10::Stream& stream, bool timed) {
  std::unique_ptr<EventNode> node(take_idle(timed));
  if (node == nullptr) {
    node = std::make_unique<EventNode>(*this, type_, timed);
    created_.fetch_add(1, std::memory_order_relaxed);
  }
  node->references.store(1, std::memory_order_relaxed);
  node->event.record(stream);  // when it throws, the event is in doubt and goes with the node
  return node.release();
}

EventNode* EventPool::take_idle(bool timed) {
  MutexLock lock(mutex_);
  EventNode* node = idle_[timed];
  if (node != nullptr) idle_[timed] = node->next_idle;
  return node;
}

void EventPool::put_back(EventNode* node) noexcept {
  MutexLock lock(mutex_);
  node->next_idle = idle_[node->timed];
  idle_[node->timed] = node;
}

}  // namespace internal

bool Event::query() const { return node_ == nullptr || node_->event.query(); }

void Event::synchronize() const {
  if (node_ != nullptr) node_->event.synchronize();
}

std::optional<int64_t> Event::elapsed_ns(const Event& begin, const Event& end) {
  if (begin.is_null() || end.is_null() || !begin.node_->timed || !end.node_->timed) return std::nullopt;
  if (!begin.query() || !end.query()) return std::nullopt;
  return elapsed_ns_of_passed(begin, end);
}

int64_t Event::elapsed_ns_of_passed(const Event& begin, const Event& end) {
  // From the backend: c10::Event would ask it twice more whether the two have passed, which is not free.
  const c10::Event& from = begin.node_->event;
  const c10::impl::VirtualGuardImpl backend(from.device_type());
  const double milliseconds = backend.elapsedTime(from.eventId(), end.node_->event.eventId(), from.device_index());
  return std::llround(milliseconds * 1e6);
}

}  // namespace neap::device
