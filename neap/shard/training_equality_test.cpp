// Sharding never changes a bit: losses and parameters are those of one process that runs every rank's micro-batches and
// adds their gradients in the same order.
#include <gtest/gtest.h>

#include <tuple>

#include "testing/sharded_training.h"

namespace neap::shard {
namespace {

using namespace testing;

Recipe recipe_for(int ranks, Stage stage, bool fusion) {
  Recipe recipe;
  recipe.model = [](int) { return rotary_decoder(); };
  recipe.optimizer = make_adamw;
  recipe.ranks = ranks;
  recipe.options.stage = stage;
  recipe.options.comm_fusion = fusion;
  return recipe;
}

class Equality : public ::testing::TestWithParam<std::tuple<int, Stage, bool>> {};

TEST_P(Equality, WithOneProcessThatAddsInRankOrder) {
  const auto [ranks, stage, fusion] = GetParam();
  Recipe recipe = recipe_for(ranks, stage, fusion);
  // It must have done something: pieces, collectives, full parameters gone.
  recipe.at_end = [&, ranks = ranks](Sharded& sharded, TestModel& model, int rank) {
    const Usage usage = sharded.usage();
    EXPECT_EQ(usage.unsharded, Bytes(0));
    EXPECT_EQ(usage.gradients, Bytes(0));
    EXPECT_EQ(usage.copied, Bytes(0));
    EXPECT_GT(usage.gathers, 0);
    int64_t held = 0, full = 0;
    for (const Shard& shard : sharded.shards()) {
      held += shard.end - shard.begin;
      full += c10::multiply_integers(shard.full_size);
    }
    int64_t seen = 0;
    for (const at::Tensor& p : model.module->parameters()) seen += p.numel();
    EXPECT_EQ(seen, held);
    EXPECT_TRUE(ranks == 1 || held < full) << "rank " << rank;
  };
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Equality,
                         ::testing::Combine(::testing::Values(1, 2, 4),
                                            ::testing::Values(Stage::kOptimizer, Stage::kGradients, Stage::kParameters),
                                            ::testing::Bool()));

TEST(Training, OverAHundredStepsWithMomentumHasTheSameBits) {
  Recipe recipe = recipe_for(4, Stage::kParameters, true);
  recipe.optimizer = make_sgd;
  recipe.steps = 100;
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST(Training, WithReplicasAddsWithinEachAndThenOverThem) {
  Recipe recipe = recipe_for(4, Stage::kParameters, true);
  recipe.mesh.data_parallel_replicate = 2;
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST(Training, MicroBatchesThatKeepFullGradientsAddUpOnTheirRankFirst) {
  for (const Stage stage : {Stage::kOptimizer, Stage::kParameters}) {
    Recipe recipe = recipe_for(2, stage, true);
    recipe.micro_batches = 3;
    recipe.no_sync = true;
    EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
  }
}

TEST(Training, MicroBatchesThatScatterGradientsAddUpAsPieces) {
  Recipe recipe = recipe_for(2, Stage::kParameters, true);
  recipe.micro_batches = 3;
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST(Training, WithoutPrefetchAndWithABucketLimitHasTheSameBits) {
  Recipe recipe = recipe_for(2, Stage::kParameters, true);
  recipe.options.prefetch = false;
  recipe.options.bucket_limit = Bytes(10'000);
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST(Training, OneUnitIsLiveBesideTheOneThatIsGathered) {
  for (const bool prefetch : {true, false}) {
    Recipe recipe = recipe_for(2, Stage::kParameters, true);
    recipe.options.prefetch = prefetch;
    recipe.at_end = [&](Sharded& sharded, TestModel&, int) {
      EXPECT_EQ(sharded.usage().live_units_peak, prefetch ? 2 : 1);
      EXPECT_EQ(sharded.usage().live_units, 0);
    };
    train_sharded(recipe);
  }
}

TEST(Training, OneGatherAndOneScatterPerGroup) {
  for (const bool fusion : {true, false}) {
    Recipe recipe = recipe_for(2, Stage::kParameters, fusion);
    recipe.at_end = [&](Sharded& sharded, TestModel& model, int) {
      const auto groups = fusion ? 5 : static_cast<int64_t>(model.module->parameters().size());
      const int64_t root = fusion ? 1 : 2, last = fusion ? 1 : 5;
      EXPECT_EQ(sharded.usage().scatters, groups * recipe.steps);
      // Units are gathered again for backward; from the second step on the last one is kept for it.
      EXPECT_EQ(sharded.usage().gathers, (2 * groups - root) * recipe.steps - last * (recipe.steps - 1));
    };
    train_sharded(recipe);
  }
}

}  // namespace
}  // namespace neap::shard
