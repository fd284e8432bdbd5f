// torch-free
// The order in which units ran last time, to know which one comes next.
//
// Recorded on the first pass and followed from then on; where a pass takes another way, the rest is recorded anew. All
// ranks run the same units, so they all predict the same. One thread at a time.
#pragma once

#include <cstddef>
#include <vector>

namespace neap::shard {

class UnitOrder {
 public:
  static constexpr int kUnknown = -1;

  // A new pass begins.
  void restart() { at_ = 0; }

  // `unit` runs now. Returns the unit that came after it at this point of the last pass.
  int advance(int unit);

 private:
  static constexpr std::size_t kLongestPass = 1 << 16;

  std::vector<int> order_;
  std::size_t at_ = 0;
};

}  // namespace neap::shard
