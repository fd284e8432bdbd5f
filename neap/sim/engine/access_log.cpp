// torch-free
#include "neap/sim/engine/access_log.h"

namespace neap::sim {

std::vector<Access> AccessLog::conflicts(const Access& next, const VectorClock& seen) const {
  std::vector<Access> found;
  for (const Access& earlier : accesses_) {
    if (earlier.stream == next.stream || !(next.write || earlier.write)) continue;
    if (earlier.end <= next.begin || next.end <= earlier.begin) continue;
    if (seen.at(earlier.stream) < earlier.number) found.push_back(earlier);
  }
  return found;
}

void AccessLog::add(const Access& next, const VectorClock& seen) {
  // Only the bytes that `next` covers become redundant; what sticks out on either side stays. A read replaces reads of
  // its own stream; a write replaces everything that is ordered before it.
  const std::size_t known = accesses_.size();
  std::size_t kept = 0;
  for (std::size_t i = 0; i < known; ++i) {
    const Access& earlier = accesses_[i];
    const bool overlaps = earlier.begin < next.end && next.begin < earlier.end;
    const bool replaced =
        overlaps && (earlier.stream == next.stream ? next.write || !earlier.write
                                                   : next.write && seen.at(earlier.stream) >= earlier.number);
    if (!replaced) {
      if (kept != i) accesses_[kept] = earlier;
      ++kept;
      continue;
    }
    const Access whole = earlier;
    // At most one entry falls apart in two for each one read, so the left part never overtakes the reading position.
    if (whole.begin < next.begin) {
      accesses_[kept] = whole;
      accesses_[kept++].end = next.begin;
    }
    if (next.end < whole.end) {
      accesses_.push_back(whole);
      accesses_.back().begin = next.end;
    }
  }
  // Entries that were split off stand behind `known`; close the gap in front of them.
  accesses_.erase(accesses_.begin() + static_cast<std::ptrdiff_t>(kept),
                  accesses_.begin() + static_cast<std::ptrdiff_t>(known));
  if (accesses_.size() >= kLimit) accesses_.erase(accesses_.begin(), accesses_.begin() + kLimit / 2);
  accesses_.push_back(next);
}

}  // namespace neap::sim
