// torch-free
// Where in a step the device's peak was. The allocator tells only how high it was; looking at it where units begin and
// end tells in which piece of the step it rose last. Not thread-safe.
#pragma once

#include <cstdint>

#include "neap/base/bytes.h"

namespace neap::offload {

// A piece of a step: what lies between two looks.
struct Piece {
  enum class Kind : uint8_t { kOutside, kForward, kAfterForward, kBackward, kAfterBackward };
  Kind kind = Kind::kOutside;
  int32_t unit = -1;
};

class PeakWatch {
 public:
  // A piece ends and `next` begins. `peak`: the allocator's so far; `away`: bytes that have left the device now.
  void look(Bytes peak, Bytes away, Piece next) {
    if (peak != peak_) {  // lower: someone has reset it, and what counts is where it will rise again
      peak_ = peak;
      at_peak_ = current_;
      away_ = away;
    }
    current_ = next;
  }

  Piece at_peak() const { return at_peak_; }
  Bytes away() const { return away_; }

 private:
  Bytes peak_, away_;
  Piece current_, at_peak_;
};

}  // namespace neap::offload
