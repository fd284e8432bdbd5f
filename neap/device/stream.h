// A queue of work on one device: a c10::Stream with the events of neap/device.
//
// A value, cheap to copy; the driver's stream belongs to the backend and is never destroyed. Streams of a plain CPU
// have no queue: their work is done when the call returns, and every operation here is a no-op. Thread-safe.
#pragma once

#include <c10/core/Stream.h>

#include "neap/device/event.h"

namespace neap::device {

class Device;

class Stream {
 public:
  // Enqueues a point after all work enqueued so far. Returns at once.
  [[nodiscard]] Event record() const;
  // The same with a time stamp (Event::elapsed_ns). Costs a little more on some devices.
  [[nodiscard]] Event record_timed() const;

  // Work enqueued on this stream from now on starts after `event`. Returns at once. Events of other devices of the same
  // type are fine. REQUIRES: the event is null or of this stream's device type.
  void wait(const Event& event) const;

  // True when all work enqueued so far is done. Never blocks.
  [[nodiscard]] bool query() const;
  // Blocks the calling thread until then.
  void synchronize() const;

  [[nodiscard]] Device& device() const noexcept { return *device_; }
  // For c10::StreamGuard and for operators of torch.
  [[nodiscard]] c10::Stream unwrap() const noexcept { return stream_; }

  friend bool operator==(const Stream& a, const Stream& b) noexcept { return a.stream_ == b.stream_; }

 private:
  friend class Device;
  Stream(Device& device, c10::Stream stream) noexcept : device_(&device), stream_(stream) {}

  Device* device_;  // registry entries live as long as the process
  c10::Stream stream_;
};

}  // namespace neap::device
