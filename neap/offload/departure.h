// torch-free
// Who leaves the device, and when: what backward needs first stays.
//
// Backward reads a pass from its end, so what may stay is its tail: the last units, the last bytes. Where the tail
// begins is known only when forward is over. From the pass before one can tell where it will be, and then everything
// before it leaves as soon as it is saved, and the tail is never copied. Without such knowledge (first step), or when a
// pass turns out longer, a storage leaves as soon as enough has been saved after it to show that it is not in the tail:
// later than it could, but never wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "neap/base/bytes.h"

namespace neap::offload {

// A pass as it was when its backward began. A run is one call of a unit's forward.
struct PassShape {
  int64_t runs = 0;
  Bytes bytes{};
};

class Departure {
 public:
  // What stays: the storages of the last `keep_runs` runs, and the last `keep_bytes` bytes, whichever is more.
  struct Tail {
    int64_t keep_runs = 0;
    Bytes keep_bytes{};
  };

  Departure(Tail tail, std::optional<PassShape> expected) : tail_(tail), expected_(expected) {}

  // For a storage of `size` saved in the run with this index in its pass, `before` bytes into it: true when it need not
  // wait for what is saved after it.
  bool leaves_at_once(int64_t run, Bytes before, Bytes size) const {
    if (tail_.keep_runs == 0 && tail_.keep_bytes.count == 0) return true;
    if (!expected_) return false;
    return run < expected_->runs - tail_.keep_runs && before + size <= expected_->bytes - tail_.keep_bytes;
  }

  // The pass before tells that what is saved in this run belongs to the tail.
  bool surely_in_tail(int64_t run) const { return expected_ && run >= expected_->runs - tail_.keep_runs; }

  // For the storage that has waited longest, saved `runs_ago` runs before the present one, when `waiting` bytes wait in
  // all, its own included.
  bool must_leave(int64_t runs_ago, Bytes waiting) const {
    return runs_ago >= tail_.keep_runs && waiting > tail_.keep_bytes;
  }

 private:
  Tail tail_;
  std::optional<PassShape> expected_;
};

}  // namespace neap::offload
