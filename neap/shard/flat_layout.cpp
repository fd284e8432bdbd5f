// torch-free
#include "neap/shard/flat_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "neap/base/error.h"

namespace neap::shard {
namespace {

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

void check_item(const FlatItem& item, std::size_t index) {
  NEAP_CHECK(item.numel >= 0, "[shard.layout] expected a size of at least 0 for parameter ", index, "; found ",
             item.numel);
  NEAP_CHECK(item.block >= 1 && item.numel % item.block == 0, "[shard.layout] expected parameter ", index, " of ",
             item.numel, " elements to be whole blocks; found blocks of ", item.block, "; choose a divisor");
}

}  // namespace

FlatLayout::FlatLayout(std::vector<FlatItem> items, int64_t ranks, int64_t alignment)
    : items_(std::move(items)), offsets_(items_.size()), ranks_(ranks), alignment_(alignment) {
  NEAP_CHECK(ranks >= 1 && alignment >= 1,
             "[shard.layout] expected at least 1 rank and an alignment of at least 1; "
             "found ",
             ranks, " and ", alignment);
  int64_t widest_block = 1;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    check_item(items_[i], i);
    used_ += items_[i].numel;
    widest_block = std::max(widest_block, items_[i].block);
  }
  // The smallest shard that holds everything. Without blocks the first try fits; with them each try that does not adds
  // what was missing.
  int64_t shard = 0;
  for (const FlatItem& item : items_) shard += round_up(item.numel, alignment_);
  shard = round_up(divide_up(shard, ranks_), alignment_);
  const int64_t limit =
      used_ + round_up(widest_block, alignment_) + alignment_ * static_cast<int64_t>(items_.size() + 1);
  for (;;) {
    const int64_t missing = place(shard) - shard * ranks_;
    if (missing <= 0) break;
    NEAP_CHECK(shard <= limit, "[shard.layout] expected blocks that an even cut over ", ranks_,
               " ranks can respect; found none up to a shard of ", shard, " elements; use smaller blocks");
    shard += round_up(divide_up(missing, ranks_), alignment_);
  }
  shard_ = shard;
}

// Sets the offsets for shards of this length; returns where the last parameter ends, or one more than the total when a
// parameter can start nowhere.
int64_t FlatLayout::place(int64_t shard) {
  int64_t end = 0;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    offsets_[i] = first_fit(items_[i], round_up(end, alignment_), shard);
    if (offsets_[i] < 0) return shard * ranks_ + 1;
    end = offsets_[i] + items_[i].numel;
  }
  return end;
}

// The first aligned place at or after `from` where no cut (a multiple of `shard`) splits a block; -1 if there is none.
int64_t FlatLayout::first_fit(const FlatItem& item, int64_t from, int64_t shard) const {
  if (item.block == 1 || item.numel == 0 || ranks_ == 1 || shard == 0) return from;
  for (int64_t cut = (from / shard + 1) * shard;; cut += shard) {
    if (from + item.numel <= cut) return from;  // lies within one shard
    const bool later_cuts_fit = shard % item.block == 0;
    // Starts whose first cut lies between two blocks come once in lcm(alignment, block) elements.
    const int64_t tries = item.block / std::gcd(item.block, alignment_);
    for (int64_t k = 0, at = from; k < tries && at < cut; ++k, at += alignment_) {
      const bool one_cut = at + item.numel <= cut + shard;
      if (at + item.numel <= cut || ((cut - at) % item.block == 0 && (one_cut || later_cuts_fit))) return at;
    }
    from = cut;
    // Starting on a cut, every cut that follows is a multiple of the shard away; if those split blocks and the
    // parameter is longer than a shard, no start helps, and the shard has to grow.
    if (item.numel > shard && !later_cuts_fit) return -1;
  }
}

Piece FlatLayout::piece(std::size_t item, int64_t rank) const {
  const int64_t shard_begin = rank * shard_;
  const int64_t begin = std::max(offsets_[item], shard_begin);
  const int64_t end = std::min(offsets_[item] + items_[item].numel, shard_begin + shard_);
  if (begin >= end) return {};
  return {begin - offsets_[item], end - offsets_[item], begin - shard_begin};
}

FlatLayout::Span FlatLayout::items_of(int64_t rank) const {
  const int64_t begin = rank * shard_;
  const int64_t end = begin + shard_;
  const auto first = std::partition_point(items_.begin(), items_.end(), [&](const FlatItem& item) {
    const auto i = static_cast<std::size_t>(&item - items_.data());
    return offsets_[i] + item.numel <= begin;
  });
  const auto last = std::lower_bound(offsets_.begin(), offsets_.end(), end);
  const auto from = static_cast<std::size_t>(first - items_.begin());
  const auto to = static_cast<std::size_t>(last - offsets_.begin());
  return from < to ? Span{from, to} : Span{};
}

std::vector<FlatLayout::Gap> FlatLayout::gaps() const {
  std::vector<Gap> gaps;
  int64_t end = 0;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (offsets_[i] > end) gaps.push_back({end, offsets_[i]});
    end = offsets_[i] + items_[i].numel;
  }
  if (total() > end) gaps.push_back({end, total()});
  return gaps;
}

std::vector<std::vector<std::size_t>> plan_groups(const std::vector<GroupKey>& parameters, bool fuse,
                                                  int64_t bucket_bytes) {
  struct Open {
    std::size_t group;
    int64_t bytes;
  };
  std::vector<std::vector<std::size_t>> groups;
  std::map<int64_t, Open> open;  // by kind
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const GroupKey& key = parameters[i];
    const auto found = open.find(key.kind);
    const bool joins =
        fuse && found != open.end() && (bucket_bytes <= 0 || found->second.bytes + key.bytes <= bucket_bytes);
    if (joins) {
      groups[found->second.group].push_back(i);
      found->second.bytes += key.bytes;
    } else {
      open[key.kind] = {groups.size(), key.bytes};
      groups.push_back({i});
    }
  }
  return groups;
}

}  // namespace neap::shard
