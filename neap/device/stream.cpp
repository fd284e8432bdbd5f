#include "neap/device/stream.h"

#include "neap/device/device.h"
#include "neap/device/event_pool.h"

namespace neap::device {

Event Stream::record() const {
  return device_->asynchronous() ? Event(device_->events_.record(stream_, /*timed=*/false)) : Event();
}

Event Stream::record_timed() const {
  return device_->asynchronous() ? Event(device_->events_.record(stream_, /*timed=*/true)) : Event();
}

void Stream::wait(const Event& event) const {
  // Also when the event has passed already: the wait costs little, and it is what makes the order visible to the device
  // (a hazard checker sees orders that were stated, not those that happened).
  if (!event.is_null()) event.node_->event.block(stream_);
}

bool Stream::query() const { return !device_->asynchronous() || stream_.query(); }

void Stream::synchronize() const {
  if (device_->asynchronous()) stream_.synchronize();
}

}  // namespace neap::device
