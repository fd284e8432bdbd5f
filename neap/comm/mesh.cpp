// torch-free
#include "neap/comm/mesh.h"

#include "neap/base/error.h"

namespace neap::comm {
namespace {

void check_size(int size, const char* name) {
  NEAP_CHECK(size == -1 || size >= 1, "[parallel.", name,
             "] expected a number of ranks, or -1 for what is left; found ", size);
}

}  // namespace

Mesh::Mesh(int world, int rank, const MeshOptions& options) : rank_(rank) {
  const int shard = options.data_parallel_shard, replicate = options.data_parallel_replicate;
  check_size(shard, "data_parallel_shard");
  check_size(replicate, "data_parallel_replicate");
  NEAP_CHECK(world >= 1 && rank >= 0 && rank < world, "[comm] expected a rank below the number of ranks; found rank ",
             rank, " of ", world);
  NEAP_CHECK(shard != -1 || replicate != -1,
             "[parallel] expected at most one of data_parallel_shard and data_parallel_replicate to be -1; found both; "
             "state one of them");
  const int stated = shard == -1 ? replicate : shard;
  NEAP_CHECK(world % stated == 0, "[parallel] expected ",
             shard == -1 ? "data_parallel_replicate" : "data_parallel_shard", " to divide the number of ranks, ", world,
             "; found ", stated);
  shard_ = shard == -1 ? world / replicate : shard;
  replicate_ = replicate == -1 ? world / shard : replicate;
  NEAP_CHECK(world / shard_ == replicate_,
             "[parallel] expected data_parallel_replicate × data_parallel_shard to be the number of ranks, ", world,
             "; found ", replicate_, " × ", shard_, "; set one of them to -1 to take what is left");
}

std::vector<int> Mesh::shard_ranks() const {
  std::vector<int> ranks(static_cast<size_t>(shard_));
  for (int i = 0; i < shard_; ++i) ranks[static_cast<size_t>(i)] = replicate_index() * shard_ + i;
  return ranks;
}

std::vector<int> Mesh::replicate_ranks() const {
  std::vector<int> ranks(static_cast<size_t>(replicate_));
  for (int i = 0; i < replicate_; ++i) ranks[static_cast<size_t>(i)] = i * shard_ + shard_index();
  return ranks;
}

std::string Mesh::shard_name() const { return "shard " + std::to_string(replicate_index()); }
std::string Mesh::replicate_name() const { return "replicate " + std::to_string(shard_index()); }

std::string Mesh::describe() const {
  return std::to_string(replicate_) + " × " + std::to_string(shard_) + " (replicate × shard)";
}

}  // namespace neap::comm
