// torch-free
#include "neap/comm/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(int world, MeshOptions options) {
  return testing::error_of([&] { const Mesh mesh(world, 0, options); });
}

TEST(Mesh, ShardsOverAllRanksUnlessTold) {
  const Mesh mesh(4, 2);
  EXPECT_EQ(mesh.shard_size(), 4);
  EXPECT_EQ(mesh.replicate_size(), 1);
  EXPECT_EQ(mesh.shard_index(), 2);
  EXPECT_EQ(mesh.replicate_index(), 0);
  EXPECT_THAT(mesh.shard_ranks(), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(mesh.replicate_ranks(), ElementsAre(2));
}

TEST(Mesh, NeighboursShareACopyAndColumnsHoldTheSamePiece) {
  const Mesh mesh(8, 6, {.data_parallel_shard = 4, .data_parallel_replicate = 2});
  EXPECT_THAT(mesh.shard_ranks(), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(mesh.replicate_ranks(), ElementsAre(2, 6));
  EXPECT_EQ(mesh.shard_index(), 2);
  EXPECT_EQ(mesh.replicate_index(), 1);
  EXPECT_EQ(mesh.shard_name(), "shard 1");
  EXPECT_EQ(mesh.replicate_name(), "replicate 2");
  EXPECT_EQ(mesh.describe(), "2 × 4 (replicate × shard)");
}

TEST(Mesh, MinusOneTakesWhatIsLeft) {
  EXPECT_EQ(Mesh(12, 0, {.data_parallel_shard = -1, .data_parallel_replicate = 3}).shard_size(), 4);
  EXPECT_EQ(Mesh(12, 0, {.data_parallel_shard = 6, .data_parallel_replicate = -1}).replicate_size(), 2);
  EXPECT_EQ(Mesh(1, 0, {.data_parallel_shard = 1, .data_parallel_replicate = 1}).world(), 1);
}

TEST(Mesh, RefusesSizesThatDoNotFit) {
  EXPECT_THAT(error_of(6, {.data_parallel_shard = 4, .data_parallel_replicate = -1}),
              HasSubstr("expected data_parallel_shard to divide the number of ranks, 6; found 4"));
  EXPECT_THAT(error_of(6, {.data_parallel_shard = -1, .data_parallel_replicate = 4}),
              HasSubstr("expected data_parallel_replicate to divide the number of ranks, 6; found 4"));
  EXPECT_THAT(error_of(8, {.data_parallel_shard = 2, .data_parallel_replicate = 2}), HasSubstr("found 2 × 2"));
  EXPECT_THAT(error_of(8, {.data_parallel_shard = -1, .data_parallel_replicate = -1}), HasSubstr("found both"));
  EXPECT_THAT(error_of(8, {.data_parallel_shard = 0}), HasSubstr("[parallel.data_parallel_shard]"));
  EXPECT_THAT(error_of(8, {.data_parallel_replicate = -2}), HasSubstr("[parallel.data_parallel_replicate]"));
  EXPECT_THROW(Mesh(4, 4), UserError);
  EXPECT_THROW(Mesh(4, -1), UserError);
}

TEST(Mesh, SizesWhoseProductOverflowsAreRefusedNotWrapped) {
  // 65536 × 65536 is 0 in 32 bits.
  EXPECT_THAT(error_of(65536, {.data_parallel_shard = 65536, .data_parallel_replicate = 65536}),
              HasSubstr("found 65536 × 65536"));
}

// Every rank is in one shard and one replicate group, and all members agree who is in them.
TEST(Mesh, GroupsOf16384RanksPartitionTheWorld) {
  constexpr int kWorld = 16'384;
  const MeshOptions options{.data_parallel_shard = 128, .data_parallel_replicate = -1};
  std::set<std::string> shards, replicas;
  for (int rank = 0; rank < kWorld; ++rank) {
    const Mesh mesh(kWorld, rank, options);
    const auto row = mesh.shard_ranks(), column = mesh.replicate_ranks();
    ASSERT_EQ(row.size(), 128u);
    ASSERT_EQ(column.size(), 128u);
    ASSERT_EQ(row[static_cast<size_t>(mesh.shard_index())], rank);
    ASSERT_EQ(column[static_cast<size_t>(mesh.replicate_index())], rank);
    const Mesh other(kWorld, row[77], options);
    ASSERT_EQ(other.shard_ranks(), row);
    ASSERT_EQ(other.shard_name(), mesh.shard_name());
    shards.insert(mesh.shard_name());
    replicas.insert(mesh.replicate_name());
  }
  EXPECT_EQ(shards.size(), 128u);
  EXPECT_EQ(replicas.size(), 128u);
}

}  // namespace
}  // namespace neap::comm
