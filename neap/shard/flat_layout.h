// torch-free
// Where the parameters of a group lie in its flat buffers. Arithmetic only; nothing here touches memory.
//
// Whole parameters lie one after another in the unsharded buffer, each start aligned; the padded total is cut evenly by
// rank. So a full parameter is one contiguous range of the buffer, and a rank's piece of it is a contiguous, possibly
// empty, range of its elements: gathers and scatters need no copy on either side. (FSDP1's FlatParameter, Zhao et al.
// 2023, has the same shape; cuts that respect rows are veScale-FSDP's, arXiv 2602.22437.)
//
//   unsharded   | a a a a a . | b b b c c . | c c c c . . |      . padding
//   shards        rank 0        rank 1        rank 2
//
// All numbers count elements, not bytes. Queries cost O(1) or O(log parameters), whatever the number of ranks.
// Immutable, hence thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace neap::shard {

struct FlatItem {
  int64_t numel = 0;
  // No cut inside the parameter splits a block of this many elements (a row, a quantisation block). 1: cut anywhere.
  int64_t block = 1;
};

// A rank's part of one parameter: the elements [begin, end) of the flattened parameter, at `shard_offset` of the rank's
// shard. Empty pieces have begin == end and shard_offset 0.
struct Piece {
  int64_t begin = 0, end = 0;
  int64_t shard_offset = 0;

  int64_t numel() const { return end - begin; }
  bool operator==(const Piece&) const = default;
};

class FlatLayout {
 public:
  // Starts of parameters and lengths of shards are multiples of `alignment`. UserError for negative sizes, for a block
  // that does not divide its parameter, and for blocks that no even cut can respect.
  FlatLayout(std::vector<FlatItem> items, int64_t ranks, int64_t alignment);

  std::size_t size() const { return items_.size(); }
  int64_t ranks() const { return ranks_; }
  int64_t numel(std::size_t item) const { return items_[item].numel; }
  // Of the parameter's first element in the unsharded buffer.
  int64_t offset(std::size_t item) const { return offsets_[item]; }

  int64_t shard_numel() const { return shard_; }
  int64_t total() const { return shard_ * ranks_; }
  // Elements of the unsharded buffer that belong to no parameter.
  int64_t padding() const { return total() - used_; }

  Piece piece(std::size_t item, int64_t rank) const;

  // The parameters of which the rank may hold a non-empty piece: [first, last).
  struct Span {
    std::size_t first = 0, last = 0;
    bool operator==(const Span&) const = default;
  };
  Span items_of(int64_t rank) const;

  // The ranges of the unsharded buffer that belong to no parameter, ascending, none empty.
  struct Gap {
    int64_t begin = 0, end = 0;
  };
  std::vector<Gap> gaps() const;

 private:
  int64_t place(int64_t shard);
  int64_t first_fit(const FlatItem& item, int64_t from, int64_t shard) const;

  std::vector<FlatItem> items_;
  std::vector<int64_t> offsets_;
  int64_t ranks_;
  int64_t alignment_;
  int64_t used_ = 0;
  int64_t shard_ = 0;
};

// What a unit's parameters are grouped by. Parameters of one group share a flat buffer and its collectives.
struct GroupKey {
  int64_t kind = 0;  // equal for parameters that may share a buffer: dtype, device, frozen or not
  int64_t bytes = 0;
};

// Indices of the parameters, group by group; within a group in their order, groups in the order of their first one.
//   fuse = false        one group per parameter
//   bucket_bytes > 0    a group is closed when the running sum of its bytes would pass the limit; a larger parameter
//                       has a group of its own
std::vector<std::vector<std::size_t>> plan_groups(const std::vector<GroupKey>& parameters, bool fuse,
                                                  int64_t bucket_bytes);

}  // namespace neap::shard
