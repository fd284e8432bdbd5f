// torch-free
// A window of bytes that learns: as small as it can be without the compute stream waiting.
//
// Used twice: for how long a storage may wait for its copy out, and for how far ahead storages come back. Both are the
// same trade of device memory against waiting. After each pass it is told what the pass's waits were like. A wait that
// stalled the compute stream for t widens the window by what the link moves in t; when even the closest copy was there
// t before it was needed, the window narrows by half of that. A link that is busy all the time is not helped by a wider
// window, so then it stays. Not thread-safe.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "neap/base/bytes.h"

namespace neap::offload {

// The waits of one pass for copies of one direction.
struct WaitSummary {
  int64_t waits = 0;
  int64_t stalled_ns = 0;  // sum
  int64_t longest_stall_ns = 0;
  int64_t least_slack_ns = std::numeric_limits<int64_t>::max();  // how early the closest copy was; none stalled
  int64_t span_ns = 0;                                           // from the first to the last of them
  Bytes moved;                                                   // what the waits were for

  // More than can be put down to chance.
  bool stalled() const { return static_cast<double>(stalled_ns) > 1e-3 * static_cast<double>(span_ns); }

  void add(int64_t wait_ns, Bytes bytes) {
    ++waits;
    moved += bytes;
    if (wait_ns > 0) {
      stalled_ns += wait_ns;
      longest_stall_ns = std::max(longest_stall_ns, wait_ns);
    } else {
      least_slack_ns = std::min(least_slack_ns, -wait_ns);
    }
  }
};

class AdaptiveWindow {
 public:
  AdaptiveWindow(Bytes initial, Bytes limit) : size_(std::min(initial, limit)), limit_(limit) {}

  Bytes size() const { return size_; }
  void set_limit(Bytes limit) {
    limit_ = limit;
    size_ = std::min(size_, limit_);
  }

  // A copy began only when it was needed: there was no lead at all. Acts at once.
  void widen() { set(std::max(2 * size_.count, kLeast)); }

  // `ns_per_byte`: what the link was measured to take; none yet: nothing is learned.
  void learn(const WaitSummary& pass, std::optional<double> ns_per_byte) {
    if (pass.waits == 0 || !ns_per_byte || *ns_per_byte <= 0) return;
    too_narrow_ = Bytes(too_narrow_.count - too_narrow_.count / kMemory);
    if (pass.stalled()) {
      const double busy_ns = static_cast<double>(pass.moved.count) * *ns_per_byte;
      if (busy_ns > kSaturated * static_cast<double>(pass.span_ns)) return;
      too_narrow_ = std::max(too_narrow_, size_);
      set(size_.count + std::llround(1.1 * static_cast<double>(pass.longest_stall_ns) / *ns_per_byte));
    } else if (pass.stalled_ns == 0) {
      const int64_t spare = std::llround(0.5 * static_cast<double>(pass.least_slack_ns) / *ns_per_byte);
      const int64_t narrower = std::max(size_.count - spare, (size_.count + too_narrow_.count) / 2);
      if (size_.count - narrower > size_.count / kWorthwhile) set(narrower);
    }
  }

 private:
  static constexpr double kSaturated = 0.95;  // of the span, the link is moving bytes
  static constexpr int64_t kWorthwhile = 8;   // narrow by more than this part, or not at all
  static constexpr int64_t kMemory = 256;     // passes after which an experience has faded
  // Below this the latency of a copy, not its bytes, is what matters.
  static constexpr int64_t kLeast = int64_t{64} << 10;

  void set(int64_t bytes) { size_ = Bytes(std::clamp(bytes, std::min(kLeast, limit_.count), limit_.count)); }

  Bytes size_;
  Bytes limit_;
  Bytes too_narrow_;  // widest that stalled, fading
};

}  // namespace neap::offload
