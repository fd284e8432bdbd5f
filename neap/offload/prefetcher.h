// torch-free
// Which saved storages to fetch next: a walk down the tape ahead of backward.
//
// Positions count what was saved in a pass. Backward unpacks them roughly from the last to the first; the walk starts
// at the position just unpacked and goes toward the beginning until enough lies ahead. It is a hint and no more: a
// position that is unpacked out of turn is served late, and the walk goes on from there. When backward returns to the
// top (retained graph), the walk starts again. Each position is visited once a sweep, so the cost per tensor does not
// grow with the tape. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "neap/base/bytes.h"

namespace neap::offload {

class Prefetcher {
 public:
  // How far the walk may go: bytes that lie ahead unused, and the first run that may be touched. Either may be open.
  struct Reach {
    Bytes bytes{std::numeric_limits<int64_t>::max()};
    int64_t first_run = 0;
  };

  enum class Visit {
    kGoOn,
    kStop,  // this position could not be fetched now: try again at the next unpack
  };

  // Backward unpacked `position`. True when that begins a new sweep: what lies ahead is counted anew.
  bool arrive(int64_t position) {
    const bool again = position >= top_ && lowest_ < top_;
    if (again) {
      ++sweep_;
      ahead_ = Bytes(0);
      lowest_ = cursor_ = top_ = position;
    } else {
      top_ = std::max(top_, position);
      lowest_ = std::min(lowest_, position);
      cursor_ = std::min(cursor_, position);
    }
    return again;
  }

  // Calls fetch(position) → Visit for positions below the cursor while the reach allows; run_of(position) names the run
  // a position was saved in. fetch() reports what then lies ahead by add_ahead().
  template <class RunOf, class Fetch>
  void walk(const Reach& reach, RunOf run_of, Fetch fetch) {
    while (cursor_ > 0 && ahead_ < reach.bytes && run_of(cursor_ - 1) >= reach.first_run) {
      if (fetch(cursor_ - 1) == Visit::kStop) return;
      --cursor_;
    }
  }

  // A storage is on the device and not yet used / has been used or is gone.
  void add_ahead(Bytes bytes) { ahead_ += bytes; }
  void take_ahead(Bytes bytes) { ahead_ -= bytes; }

  Bytes ahead() const { return ahead_; }
  // Of the sweep that is going on; the first is 1.
  int64_t sweep() const { return sweep_; }
  // False until the first unpack.
  bool started() const { return top_ >= 0; }

 private:
  static constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

  int64_t sweep_ = 1;
  int64_t top_ = -1;           // highest position unpacked in this sweep
  int64_t lowest_ = kNowhere;  // lowest one
  int64_t cursor_ = kNowhere;  // positions from here up have been visited
  Bytes ahead_;
};

}  // namespace neap::offload
