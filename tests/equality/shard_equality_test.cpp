// Sharding never changes a bit of a decoder's training, on the CPU and on the simulated accelerator, with and without
// offload and recomputation: losses and parameters are those of one process that runs every rank's micro-batches and
// adds their gradients in rank order, without any of it.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <ostream>
#include <tuple>

#include "neap/models/causal_lm.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "testing/deepseek_config.h"
#include "testing/sharded_training.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

// Autograd starts its threads, one a device, with the first backward of the process: sim has to be there before.
class SimIsThere : public ::testing::Environment {
  void SetUp() override { sim_control(); }
};
const auto* const kSimIsThere = ::testing::AddGlobalTestEnvironment(new SimIsThere());

struct Layout {
  const char* name;
  int ranks, replicas;
  bool comm_fusion;
  shard::Stage stage;
};

void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

constexpr Layout kOne{"one rank", 1, 1, true, shard::Stage::kParameters};
constexpr Layout kTwo{"two ranks", 2, 1, true, shard::Stage::kParameters};
constexpr Layout kTwoUnfused{"two ranks, unfused", 2, 1, false, shard::Stage::kParameters};
constexpr Layout kTwoOptimizer{"two ranks, optimizer state alone", 2, 1, true, shard::Stage::kOptimizer};
constexpr Layout kFour{"four ranks", 4, 1, true, shard::Stage::kParameters};
constexpr Layout kTwoByTwo{"two replicas of two", 4, 2, true, shard::Stage::kParameters};

TestModel decoder(const models::ModelConfig& config, c10::Device device) {
  const auto model = models::make_model(config, at::TensorOptions().device(device), /*seed=*/3);
  return {
      model, [model, device](int64_t micro_batch) {
        const auto ids = (at::arange(2 * 33, at::kLong) * 11 + micro_batch * 5).remainder(97).view({2, 33}).to(device);
        return model->loss(ids.narrow(1, 0, 32), ids.narrow(1, 1, 32));
      }};
}

TestModel llama(c10::Device device, bool tied) {
  models::ModelConfig config;
  config.model_type = "llama";
  config.vocab_size = 97;
  config.hidden_size = 48;
  config.intermediate_size = 128;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.tie_word_embeddings = tied;
  return decoder(config, device);
}

// Experts lie in pieces like other parameters, whoever's tokens they get.
TestModel deepseek(c10::Device device) { return decoder(small_deepseek(/*vocabulary=*/97), device); }

Recipe recipe_for(const Layout& layout) {
  Recipe recipe;
  recipe.optimizer = make_adamw;
  recipe.ranks = layout.ranks;
  recipe.mesh.data_parallel_replicate = layout.replicas;
  recipe.options.comm_fusion = layout.comm_fusion;
  recipe.options.stage = layout.stage;
  recipe.at_end = [ranks = layout.ranks / layout.replicas](shard::Sharded& sharded, TestModel&, int) {
    const shard::Usage usage = sharded.usage();
    EXPECT_EQ(usage.copied, Bytes(0));
    EXPECT_EQ(usage.unsharded, Bytes(0));
    EXPECT_EQ(usage.shards, usage.minimum);
    int64_t full = 0, held = 0;
    for (const shard::Shard& shard : sharded.shards()) {
      full += c10::multiply_integers(shard.full_size);
      held += shard.data.numel();
    }
    EXPECT_LE(Bytes(held * 4), usage.minimum);
    const auto groups_at_most = static_cast<int64_t>(sharded.shards().size());
    EXPECT_LE(usage.minimum, Bytes(full * 4 / ranks + groups_at_most * 64));  // a cache line of padding for each
  };
  return recipe;
}

class CpuEquality : public ::testing::TestWithParam<std::tuple<Layout, bool>> {};

TEST_P(CpuEquality, OverTenSteps) {
  const auto& [layout, tied] = GetParam();
  Recipe recipe = recipe_for(layout);
  recipe.model = [tied = tied](int) { return llama(at::kCPU, tied); };
  recipe.steps = 10;
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

INSTANTIATE_TEST_SUITE_P(Llama, CpuEquality,
                         ::testing::Combine(::testing::Values(kOne, kTwo, kTwoUnfused, kTwoOptimizer, kFour, kTwoByTwo),
                                            ::testing::Bool()));

TEST(CpuEqualityOfExperts, OverTenSteps) {
  for (const Layout& layout : {kOne, kTwo, kTwoUnfused, kFour, kTwoByTwo}) {
    Recipe recipe = recipe_for(layout);
    recipe.model = [](int) { return deepseek(at::kCPU); };
    recipe.steps = 10;
    EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe))) << layout.name;
  }
}

TEST(CpuEqualityLong, OverAHundredSteps) {
  for (const Layout& layout : {kOne, kTwo, kFour, kTwoByTwo}) {
    Recipe recipe = recipe_for(layout);
    recipe.model = [](int) { return llama(at::kCPU, false); };
    recipe.steps = 100;
    EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe))) << layout.name;
  }
}

struct Way {
  const char* name;
  bool offloads, recomputes;
  bool freezes;  // a layer, whose full weights come and go under the offload engine's eyes
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

constexpr Way kWays[] = {{"plain", false, false, false},
                         {"offload", true, false, false},
                         {"recompute", false, true, false},
                         {"both", true, true, false},
                         {"offload, a frozen layer", true, false, true},
                         {"both, a frozen layer", true, true, true}};

TestModel model_on_sim(bool experts, int rank, const Way& way) {
  const TestModel model = experts ? deepseek(sim(rank)) : llama(sim(rank), false);
  for (auto& item : model.module->named_parameters()) {
    if (way.freezes && item.key().starts_with("model.layers.1.")) item.value().set_requires_grad(false);
  }
  return model;
}

class SimEquality : public SimTest, public ::testing::WithParamInterface<std::tuple<bool, Layout, Way>> {};

TEST_P(SimEquality, WithOffloadAndRecomputation) {
  const auto& [experts, layout, way] = GetParam();
  Recipe recipe = recipe_for(layout);
  recipe.steps = 3;
  recipe.model = [experts = experts, way = way](int rank) { return model_on_sim(experts, rank, way); };
  std::map<int, std::unique_ptr<offload::Engine>> engines;
  std::map<int, std::unique_ptr<recompute::Recompute>> recomputes;
  Recipe sharded = recipe;
  sharded.model = [&, experts = experts, way = way](int rank) {
    const TestModel model = model_on_sim(experts, rank, way);
    if (way.offloads) {
      offload::Options options;
      options.min_bytes = Bytes(0);
      options.keep_last = 0;
      options.max_in_flight = Bytes(0);  // no device memory waits for its copy: all of it moves
      engines[rank] = std::make_unique<offload::Engine>(options);
      engines[rank]->attach(*model.module);
    }
    if (way.recomputes) {
      recomputes[rank] = std::make_unique<recompute::Recompute>();
      recomputes[rank]->attach(*model.module);
    }
    return model;
  };
  const Trained with = train_sharded(sharded);
  for (const auto& [rank, engine] : engines) {
    EXPECT_GT(engine->take_step_report().offloaded_bytes, Bytes(0)) << "rank " << rank;
  }
  for (const auto& [rank, recompute] : recomputes) {
    EXPECT_GT(recompute->take_step_report().reruns, 0) << "rank " << rank;
  }
  engines.clear();
  EXPECT_TRUE(bit_equal(with, train_alone(recipe)));
}

INSTANTIATE_TEST_SUITE_P(Llama, SimEquality,
                         ::testing::Combine(::testing::Values(false), ::testing::Values(kOne, kTwo),
                                            ::testing::ValuesIn(kWays)));
INSTANTIATE_TEST_SUITE_P(Deepseek, SimEquality,
                         ::testing::Combine(::testing::Values(true), ::testing::Values(kTwo),
                                            ::testing::ValuesIn(kWays)));

}  // namespace
}  // namespace neap::testing
