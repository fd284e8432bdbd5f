// torch-free
// What has happened before: for each stream, the number of its last operation that is known to be ordered before us.
// Few streams exist, so the clock is a short array; the first ten live inline and cost no allocation.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace neap::sim {

class VectorClock {
 public:
  uint64_t at(int stream) const {
    const auto i = static_cast<std::size_t>(stream);
    if (i < kInline) return inline_[i];
    return i - kInline < more_.size() ? more_[i - kInline] : 0;
  }
  void set(int stream, uint64_t number) {
    const auto i = static_cast<std::size_t>(stream);
    if (i < kInline) {
      inline_[i] = number;
      return;
    }
    if (more_.size() <= i - kInline) more_.resize(i - kInline + 1);
    more_[i - kInline] = number;
  }
  // Everything known to `other` becomes known here. True when that was news.
  bool merge(const VectorClock& other) {
    bool news = false;
    for (std::size_t i = 0; i < kInline; ++i) news |= raise(inline_[i], other.inline_[i]);
    if (more_.size() < other.more_.size()) more_.resize(other.more_.size());
    for (std::size_t i = 0; i < other.more_.size(); ++i) news |= raise(more_[i], other.more_[i]);
    return news;
  }

 private:
  static constexpr std::size_t kInline = 10;

  static bool raise(uint64_t& mine, uint64_t theirs) {
    if (theirs <= mine) return false;
    mine = theirs;
    return true;
  }

  std::array<uint64_t, kInline> inline_{};
  std::vector<uint64_t> more_;
};

}  // namespace neap::sim
