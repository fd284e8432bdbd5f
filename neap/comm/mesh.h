// torch-free
// How the ranks of a run are laid out: replicate × shard, row by row. Rank r holds piece r % shard of copy r / shard.
//
//             shard group →
//   replicate   0  1  2  3        one row:    the ranks that hold the pieces of one copy   (shard group)
//   group ↓     4  5  6  7        one column: the ranks that hold the same piece           (replicate group)
//
// Neighbouring ranks, usually of one host, share a row: the gathers of every unit stay on the fast links. Arithmetic
// alone, no communication: a rank works out its own row and column and nothing of the others', so that 16,384 ranks
// cost what 2 do. A value; thread-safe like an int.
#pragma once

#include <string>
#include <vector>

namespace neap::comm {

// As a run file states them.
struct MeshOptions {
  int data_parallel_shard = -1;     // ranks that share one copy of the parameters; -1 = all that replicate leaves
  int data_parallel_replicate = 1;  // copies; -1 = as many as shard leaves
};

class Mesh {
 public:
  // UserError when the two sizes do not multiply to `world`, or both are -1. REQUIRES: 0 <= rank < world.
  Mesh(int world, int rank, const MeshOptions& options = {});

  [[nodiscard]] int world() const noexcept { return shard_ * replicate_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int shard_size() const noexcept { return shard_; }
  [[nodiscard]] int replicate_size() const noexcept { return replicate_; }

  // This rank's place: which piece it holds (its index in the shard group), and of which copy (its index in the
  // replicate group).
  [[nodiscard]] int shard_index() const noexcept { return rank_ % shard_; }
  [[nodiscard]] int replicate_index() const noexcept { return rank_ / shard_; }

  // World ranks, ascending, this rank among them.
  [[nodiscard]] std::vector<int> shard_ranks() const;
  [[nodiscard]] std::vector<int> replicate_ranks() const;

  // Names of this rank's two groups, unique in the world: "shard 0", "replicate 3".
  [[nodiscard]] std::string shard_name() const;
  [[nodiscard]] std::string replicate_name() const;

  // "2 × 4 (replicate × shard)"
  [[nodiscard]] std::string describe() const;

 private:
  int rank_;
  int shard_ = 1;
  int replicate_ = 1;
};

}  // namespace neap::comm
