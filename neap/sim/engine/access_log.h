// torch-free
// Which operations touched which bytes of one block, as far as they still matter to a later one. The memory of the
// hazard checker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "neap/sim/engine/vector_clock.h"

namespace neap::sim {

struct Access {
  int stream = 0;  // index of the stream in vector clocks
  bool write = false;
  uint64_t number = 0;  // of the operation on its stream
  std::size_t begin = 0;
  std::size_t end = 0;
  const char* what = "";
};

// Not thread-safe.
class AccessLog {
 public:
  // Every earlier access that overlaps `next`, where one of the two writes, and that is not ordered before `next`
  // according to `seen`. Of a right program none, and then nothing is allocated.
  std::vector<Access> conflicts(const Access& next, const VectorClock& seen) const;
  // Notes `next`, and forgets what it makes redundant: whoever is ordered after `next` is ordered after that too.
  void add(const Access& next, const VectorClock& seen);

  const std::vector<Access>& accesses() const { return accesses_; }
  void clear() { accesses_.clear(); }

 private:
  // Beyond this many, the oldest are forgotten: better a missed report than a wrong one.
  static constexpr std::size_t kLimit = 1024;

  std::vector<Access> accesses_;
};

}  // namespace neap::sim
