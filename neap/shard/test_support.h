// Small nets, sharded on ranks that are threads, for the tests of this layer.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "testing/sharded_training.h"

namespace neap::shard {

inline constexpr int64_t kSide = testing::TestNet::kWidth;  // of a dense unit's square weight

inline std::shared_ptr<testing::TestNet> three_units() {
  using testing::dense_unit;
  return std::make_shared<testing::TestNet>(std::vector{dense_unit(1), dense_unit(2), dense_unit(3)});
}

// Each rank with a net of its own, sharded over all.
inline void on_ranks(int ranks, const Options& options,
                     const std::function<void(comm::World&, testing::TestNet&, Sharded&)>& body) {
  std::vector<std::shared_ptr<testing::TestNet>> nets;
  for (int rank = 0; rank < ranks; ++rank) nets.push_back(three_units());
  testing::run_ranks(ranks, [&](comm::World& world) {
    testing::TestNet& net = *nets[static_cast<std::size_t>(world.rank())];
    Sharded sharded = fully_shard(net, world.groups(comm::Mesh(world.size(), world.rank())), options);
    body(world, net, sharded);
  });
}

inline void expect_at_rest(const Sharded& sharded) {
  const Usage usage = sharded.usage();
  EXPECT_EQ(usage.unsharded, Bytes(0));
  EXPECT_EQ(usage.gradients, Bytes(0));
  EXPECT_EQ(usage.live_units, 0);
  EXPECT_EQ(usage.shards, usage.minimum);
  for (const at::Tensor& p : sharded.parameters()) EXPECT_EQ(p.dim(), 1);
}

}  // namespace neap::shard
