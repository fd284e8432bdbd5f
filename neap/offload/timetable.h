// torch-free
// When each copy of a pass should begin and when it is over, foretold from the times of the pass before.
//
// A window of bytes holds the same lead everywhere: enough where the link is behind, and too much where the device is
// fullest. A timetable knows both. It is made of two rows of times of the compute stream, with the stream's waits for
// our copies taken out: when each storage was saved in forward, and when each was first used in backward. With what the
// link takes for a byte,
//  - the copy out of a storage is over by the time some later one is saved. There its memory is let go: the wait costs
//    nothing, and sooner it would;
//  - counted from the last use to the first, every copy in has a latest moment to begin. It begins at the last use
//    before that moment, so the memory it comes to is taken as late as it can be;
//  - what would have to begin before backward does stays on the device: the tail.
//
// It is advice and no more: a pass that goes another way is served late here and there, and tells its own times to the
// next. Immutable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/offload/adaptive_window.h"

namespace neap::offload {

// The n-th storage that a pass saved, or a waypoint, which has no bytes.
struct SaveTime {
  int64_t at_ns = 0;
  Bytes size{};
};

// A storage's first use in backward, through the saved tensor at this position of the tape; or backward's coming by a
// waypoint.
struct UseTime {
  int64_t at_ns = 0;
  Bytes size{};
  int64_t position = 0;
};

// What copies of one direction are reckoned to take, and how much sooner than that the last of a row should be over.
struct CopyCost {
  double ns_per_byte = 0;
  int64_t slack_ns = 0;
  int64_t of(Bytes size) const;
};

// Grows when passes that went by their timetable stalled all the same, and fades. Not thread-safe.
class Slack {
 public:
  int64_t ns() const { return ns_; }
  void learn(const WaitSummary& pass) {
    ns_ = pass.stalled() ? std::min(std::max(2 * ns_, pass.longest_stall_ns), pass.span_ns / kLeastPart)
                         : ns_ - ns_ / kMemory;
  }

 private:
  static constexpr int64_t kLeastPart = 16;  // of the span: more would be a window
  static constexpr int64_t kMemory = 64;     // passes

  int64_t ns_ = 0;
};

class Timetable {
 public:
  // Saves and uses in order. Nothing when the link would be busy nearly all the time: then waits cannot be avoided,
  // only memory bounded. `length`: of the tape, positions are below it.
  static std::optional<Timetable> make(const std::vector<SaveTime>& saves, const std::vector<UseTime>& uses,
                                       int64_t length, CopyCost out, CopyCost in);

  // ---- is this the pass it was made for?
  int64_t length() const { return length_; }
  int64_t storages() const { return static_cast<int64_t>(sizes_.size()); }
  bool expects(int64_t storage, Bytes size) const { return storage < storages() && at(sizes_, storage) == size; }

  // ---- forward
  Bytes tail() const { return tail_; }
  // The copy out of a storage is over when the one with this number is saved. kNever: not before forward is over.
  int64_t out_by(int64_t storage) const { return at(out_by_, storage); }
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // ---- backward
  // Once backward has come to `position`, so many of the uses, from the first on, should have their bytes here or on
  // their way. 0 for a position that is nobody's first use.
  int64_t in_by(int64_t position) const { return at(in_by_, position); }
  int64_t position(int64_t use) const { return at(positions_, use); }

  // ---- for people: the most that is on its way out, and the most that is here or on its way in before its use.
  Bytes in_flight() const { return in_flight_; }
  Bytes ahead() const { return ahead_; }

 private:
  Timetable() = default;
  template <class T>
  static const T& at(const std::vector<T>& row, int64_t index) {
    return row[static_cast<size_t>(index)];
  }
  bool plan_in(const std::vector<UseTime>& uses, CopyCost in);
  bool plan_out(const std::vector<SaveTime>& saves, CopyCost out);

  int64_t length_ = 0;
  std::vector<Bytes> sizes_;        // by storage
  std::vector<int64_t> out_by_;     // by storage
  std::vector<int64_t> in_by_;      // by position
  std::vector<int64_t> positions_;  // by use
  Bytes tail_, in_flight_, ahead_;
};

}  // namespace neap::offload
