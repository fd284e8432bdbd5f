// HyperParallel issue 664 in its full form, with ranks as threads: a DeepSeek-V3 of twelve layers in pieces over four
// ranks, layer swap of layers 0 to 10 with prefetch 1, against sharding alone and against swapping attention alone. Ten
// steps have the same bits in losses, gradient norms and parameters; and something really was cut and really went out.
// tests/cli/test_hyperparallel_664.py runs eight processes.
#include <c10/util/accumulate.h>

#include <map>
#include <memory>

#include "neap/models/causal_lm.h"
#include "testing/deepseek_config.h"
#include "testing/sharded_training.h"
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

constexpr int kRanks = 4;
const bool kDevices = use_sim_devices(kRanks);

// Autograd starts its threads, one a device, with the first backward of the process: sim has to be there before.
class SimIsThere : public ::testing::Environment {
  void SetUp() override { sim_control(); }
};
const auto* const kSimIsThere = ::testing::AddGlobalTestEnvironment(new SimIsThere());

class HyperParallel664Sharded : public IssueTest {
 protected:
  struct Run {
    Trained trained;
    std::map<int, std::vector<double>> norms;  // of each rank's steps
    std::map<int, int64_t> peaks, offloaded;
  };

  static TestModel model(int rank) {
    models::ModelConfig config = small_deepseek(/*vocabulary=*/97);
    config.num_hidden_layers = 12;
    const auto deepseek = models::make_model(config, on_sim(rank), /*seed=*/3);
    return {deepseek, [deepseek, rank](int64_t micro_batch) {
              const auto ids = (at::arange(2 * 33, at::kLong) * 11 + micro_batch * 5).remainder(97).view({2, 33});
              const auto here = ids.to(sim(rank));
              return deepseek->loss(here.narrow(1, 0, 32), here.narrow(1, 1, 32));
            }};
  }

  static void expect_pieces(shard::Sharded& sharded) {
    int64_t full = 0, held = 0;
    for (const shard::Shard& shard : sharded.shards()) {
      full += c10::multiply_integers(shard.full_size);
      held += shard.data.numel();
      EXPECT_EQ(shard.data.dim(), 1);
      EXPECT_EQ(shard.data.numel(), shard.end - shard.begin);
    }
    const shard::Usage usage = sharded.usage();
    EXPECT_NEAR(static_cast<double>(held), static_cast<double>(full) / kRanks, 0.02 * static_cast<double>(full));
    EXPECT_EQ(usage.unsharded, Bytes(0));
    EXPECT_EQ(usage.shards, usage.minimum);
  }

  // `patterns` empty: no engine.
  static Run run(const std::vector<std::string>& patterns) {
    Run out;
    std::map<int, std::unique_ptr<offload::Engine>> engines;
    Recipe recipe;
    recipe.ranks = kRanks;
    recipe.steps = 10;
    recipe.optimizer = make_adamw;
    recipe.model = [&](int rank) {
      TestModel made = model(rank);
      out.norms[rank] = {}, out.peaks[rank] = 0;
      if (!patterns.empty()) {
        auto options = everything_leaves();
        options.prefetch = offload::Layers{1};
        engines[rank] = std::make_unique<offload::Engine>(options);
        engines[rank]->attach(*made.module, patterns);
      }
      return made;
    };
    recipe.after_backward = [&](shard::Sharded& sharded, int rank) {
      out.norms.at(rank).push_back(sharded.grad_norm());
      // Of the second step on: the first one also holds what the model was made of.
      if (out.norms.at(rank).size() == 1) control().reset_peak(rank);
    };
    recipe.at_end = [&](shard::Sharded& sharded, TestModel&, int rank) {
      out.peaks.at(rank) = control().memory(rank).requested_peak;
      expect_pieces(sharded);
    };
    out.trained = train_sharded(recipe);
    for (const auto& [rank, engine] : engines) out.offloaded[rank] = engine->take_step_report().offloaded_bytes.count;
    return out;
  }
};

TEST_F(HyperParallel664Sharded, LayerSwapAndAttentionSwapHaveTheBitsOfShardingAlone) {
  const Run alone = run({});
  ASSERT_EQ(alone.norms.at(0).size(), 10);
  for (const auto& patterns :
       {std::vector<std::string>{"0-10"}, std::vector<std::string>{"model.layers.{*}.self_attn"}}) {
    const Run swapped = run(patterns);
    EXPECT_TRUE(bit_equal(alone.trained, swapped.trained)) << patterns.front();
    EXPECT_EQ(alone.norms, swapped.norms) << patterns.front();
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_GT(swapped.offloaded.at(rank), 0) << patterns.front();
      EXPECT_LT(swapped.peaks.at(rank), alone.peaks.at(rank)) << patterns.front();
    }
  }
}

}  // namespace
}  // namespace neap::testing
