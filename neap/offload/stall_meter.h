// How long the compute stream stood waiting for our copies, learned from events after the fact and without waiting.
//
// Each wait is a pair of timed events: `before`, recorded on the compute stream right before the wait, and `until`, the
// end of the copy it waits for. Once both have passed, the stream waited max(0, until - before); when negative, the
// copy was early by that much.
//
// Asking whether an event has passed is not free, so waits are read a pass at a time: copies of one direction and work
// of one compute stream are done in order, so when the last pair of a pass has passed, so have all. Not thread-safe:
// guarded by the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/device/event.h"
#include "neap/offload/adaptive_window.h"

namespace neap::offload {

class StallMeter {
 public:
  // kLate: the copy began only when it was needed. That is exposed time, but no window would have changed it.
  enum class Begun { kAhead, kLate };
  void add(const device::Event& before, const device::Event& until, Bytes bytes, Begun begun = Begun::kAhead);
  // Work that was exposed as a whole: a synchronous copy.
  void add_exposed_ns(int64_t ns) { exposed_ns_ += ns; }

  // What comes now belongs to another pass.
  void end_pass();
  // The waits of the oldest pass not told yet, when it has ended and its events have passed.
  std::optional<WaitSummary> next_pass();
  // Of all passes told so far, since the last call.
  int64_t take_exposed_ns();

 private:
  struct Pair {
    device::Event before, until;
    Bytes bytes;
    Begun begun;
  };
  using Pass = std::vector<Pair>;
  // More than the waits of one pass of a large model. Beyond it waits go unmeasured, so that events of the driver do
  // not pile up without end.
  static constexpr size_t kMostPairs = 8192;
  static constexpr size_t kMostPasses = 64;

  WaitSummary read(const Pass& pass);

  std::deque<Pass> ended_;
  Pass current_;
  int64_t exposed_ns_ = 0;
};

// What the link takes for a byte, from copies whose begin and end were timed. Only a sample of the copies is.
class LinkRate {
 public:
  bool wants_sample() { return copies_++ % kEvery == 0; }
  void add(device::Event begin, device::Event end, Bytes bytes);
  // After a look at the sample with the most bytes, when it is over.
  std::optional<double> ns_per_byte();

 private:
  static constexpr int64_t kEvery = 8;

  struct Sample {
    device::Event begin, end;
    Bytes bytes{};
  };
  int64_t copies_ = 0;
  std::optional<Sample> largest_;  // since the last one that was read
  std::optional<double> ns_per_byte_;
};

}  // namespace neap::offload
