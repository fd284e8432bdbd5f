// How long the compute stream stood waiting for our copies, and when it came by the points that a timetable is made of;
// learned from events after the fact and without waiting.
//
// Each wait is a pair of timed events: `before`, recorded on the compute stream right before the wait, and `until`, the
// end of the copy it waits for. Once both have passed, the stream waited max(0, until - before); when negative, the
// copy was early by that much.
//
// Asking whether an event has passed is not free, so waits are read a pass at a time: copies of one direction and work
// of one compute stream are done in order, so when the last of a pass has passed, so have all. Not thread-safe: guarded
// by the engine's lock.
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

// A place that the compute stream came by: where a storage was saved, or first used.
struct Point {
  int64_t place = 0;  // the caller's
  Bytes bytes;
  int64_t at_ns = 0;  // since the first moment of the pass, the waits before it taken out
};

// What became of a pass in one direction.
struct PassTimes {
  WaitSummary waits{};
  std::vector<Point> points{};
  int64_t pass = 0;      // of the points
  bool complete = true;  // all its points, and no other pass's
  bool by_timetable = false;
};

class StallMeter {
 public:
  // kLate: the copy began only when it was needed. That is exposed time, but no window would have changed it.
  enum class Begun { kAhead, kLate };
  void add_wait(const device::Event& before, const device::Event& until, Bytes bytes, Begun begun = Begun::kAhead);
  // REQUIRES: before the wait at that place, if there is one.
  void add_point(const device::Event& at, Bytes bytes, int64_t pass, int64_t place);
  // Work that was exposed as a whole: a synchronous copy.
  void add_exposed_ns(int64_t ns) { exposed_ns_ += ns; }

  // What comes now belongs to another pass; this one went by a timetable, or did not.
  void end_pass(bool by_timetable);
  // Those of the oldest pass not told yet, when it has ended and its events have passed.
  std::optional<PassTimes> next_pass();
  // Of all passes told so far, since the last call.
  int64_t take_exposed_ns();

 private:
  struct Entry {
    device::Event at;
    device::Event until{};  // null: a point
    Bytes bytes{};
    int64_t place = 0;
    Begun begun = Begun::kAhead;
  };
  struct Pass {
    std::vector<Entry> entries;
    std::optional<int64_t> number;
    bool complete = true;
    bool by_timetable = false;
  };
  // More than one pass of a large model has. Beyond it nothing is measured, so that events of the driver do not pile up
  // without end.
  static constexpr size_t kMostEntries = 16384;
  static constexpr size_t kMostPasses = 64;

  void add(Entry entry);
  PassTimes read(const Pass& pass);

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
