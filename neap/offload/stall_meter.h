// How long the compute stream stood waiting for our copies, learned from events after the fact and without waiting.
//
// Each wait is a pair of timed events: `before`, recorded on the compute stream right before the wait, and `until`, the
// end of the copy it waits for. Once both have passed, the stream waited max(0, until - before); when negative, the
// copy was early by that much. Not thread-safe: guarded by the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "neap/base/bytes.h"
#include "neap/device/event.h"
#include "neap/offload/adaptive_window.h"

namespace neap::offload {

class StallMeter {
 public:
  void add(device::Event before, device::Event until, Bytes bytes);
  // Work that was exposed as a whole: a synchronous copy.
  void add_exposed_ns(int64_t ns) { exposed_ns_ += ns; }

  // Reads the pairs that have passed, oldest first, up to the first that has not.
  void settle();
  // Of the pairs read since the last call.
  WaitSummary take_summary();
  // Everything read since the last call.
  int64_t take_exposed_ns();

 private:
  struct Pair {
    device::Event before, until;
    Bytes bytes;
  };
  // Enough for the waits of one pass of a large model. Beyond it the oldest are read early or given up, so that a
  // device that lags far behind does not make the driver's events pile up.
  static constexpr size_t kMostPairs = 8192;

  std::deque<Pair> pairs_;
  WaitSummary summary_;
  std::optional<device::Event> first_;  // `before` of the summary's first pair
  int64_t exposed_ns_ = 0;
};

// What the link takes for a byte, from copies whose begin and end were timed. Only a sample of the copies is.
class LinkRate {
 public:
  bool wants_sample() { return copies_++ % kEvery == 0; }
  void add(device::Event begin, device::Event end, Bytes bytes);
  void settle();
  std::optional<double> ns_per_byte() const { return ns_per_byte_; }

 private:
  static constexpr int64_t kEvery = 8;
  static constexpr size_t kMostSamples = 256;

  struct Sample {
    device::Event begin, end;
    Bytes bytes;
  };
  int64_t copies_ = 0;
  std::deque<Sample> samples_;
  std::optional<double> ns_per_byte_;
};

}  // namespace neap::offload
