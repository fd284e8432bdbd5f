// A point in the work of a stream: made by Stream::record(), waited for by streams and, rarely, by the host.
//
// An Event is one recording and never changes; copies share it, so that a host buffer and a saved storage can both hold
// the end of one copy. Recording again makes another Event, which is c10's versioned semantics made visible: whoever
// waits for the earlier point is not affected. The default Event, and every event of a plain CPU, is null: it has
// passed.
//
// The driver's events behind it are pooled per device and come back when the last copy goes, so a steady run creates
// none. Thread-safe like an int: different objects may be used from any thread, query() and synchronize() also on
// shared copies; one object must not be assigned while another thread uses it.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

namespace neap::device {

namespace internal {
struct EventNode;
void retain(EventNode* node) noexcept;
void release(EventNode* node) noexcept;
}  // namespace internal

class Event {
 public:
  Event() noexcept = default;
  Event(const Event& other) noexcept : node_(other.node_) { internal::retain(node_); }
  Event(Event&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  Event& operator=(Event other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~Event() { internal::release(node_); }

  // True for the default Event: nothing to wait for.
  [[nodiscard]] bool is_null() const noexcept { return node_ == nullptr; }

  // True once everything enqueued before the point is done. Never blocks, never takes Python's lock. A device error
  // that surfaces here is thrown as the device's own error (c10::Error).
  [[nodiscard]] bool query() const;

  // Blocks the calling thread until query() is true. Not for the steady state of a step.
  void synchronize() const;

  // Device time from `begin` to `end`. Empty when either is null, not timed (Stream::record_timed), or not passed yet.
  static std::optional<int64_t> elapsed_ns(const Event& begin, const Event& end);
  // The same for events that are known to have passed, say because later ones of their streams have: asks for nothing
  // but the difference. REQUIRES: both timed and passed, else a device's own error.
  static int64_t elapsed_ns_of_passed(const Event& begin, const Event& end);

 private:
  friend class Stream;
  explicit Event(internal::EventNode* owned) noexcept : node_(owned) {}

  internal::EventNode* node_ = nullptr;  // counted reference
};

}  // namespace neap::device
