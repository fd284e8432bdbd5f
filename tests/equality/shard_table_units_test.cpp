// The embedding and the output head as units of their own: what their tables cost at a step's peak, and every way in
// which a model uses them.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "neap/models/causal_lm.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "testing/matchers.h"
#include "testing/sharded_training.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocabulary = 512, kHidden = 16, kLayers = 3;

models::ModelConfig wide_config(bool tied) {
  models::ModelConfig config;
  config.model_type = "llama";
  config.vocab_size = kVocabulary;
  config.hidden_size = kHidden;
  config.intermediate_size = 32;
  config.num_hidden_layers = kLayers;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.tie_word_embeddings = tied;
  return config;
}

struct Batch {
  at::Tensor ids, labels;
};

Batch batch_of(int64_t micro_batch, c10::Device device) {
  const auto ids = (at::arange(2 * 9, at::kLong) * 11 + micro_batch * 5).remainder(kVocabulary).view({2, 9}).to(device);
  return {ids.narrow(1, 0, 8), ids.narrow(1, 1, 8)};
}

using Use = at::Tensor (*)(models::CausalLM& model, const Batch& batch, int64_t micro_batch);

at::Tensor use_loss(models::CausalLM& model, const Batch& batch, int64_t /*micro_batch*/) {
  return model.loss(batch.ids, batch.labels);
}
at::Tensor use_logits(models::CausalLM& model, const Batch& batch, int64_t /*micro_batch*/) {
  return at::cross_entropy_loss(model.logits(batch.ids).flatten(0, 1), batch.labels.reshape({-1}));
}
at::Tensor use_both(models::CausalLM& model, const Batch& batch, int64_t micro_batch) {
  return use_logits(model, batch, micro_batch) + use_loss(model, batch, micro_batch);
}
// With two ranks and one micro-batch each: one step this way, the next one that.
at::Tensor use_in_turns(models::CausalLM& model, const Batch& batch, int64_t micro_batch) {
  return (micro_batch / 2 % 2 == 0 ? use_loss : use_logits)(model, batch, micro_batch);
}
at::Tensor use_no_head(models::CausalLM& model, const Batch& batch, int64_t /*micro_batch*/) {
  return model.hidden(batch.ids).pow(2).mean();
}

TestModel tables(Use use, c10::Device device = at::kCPU, const char* frozen = nullptr, bool tied = false) {
  const auto model = models::make_model(wide_config(tied), at::TensorOptions().device(device), /*seed=*/3);
  if (frozen != nullptr) model->named_parameters()[frozen].set_requires_grad(false);
  return {model, [=](int64_t micro_batch) { return use(*model, batch_of(micro_batch, device), micro_batch); }};
}

// Two ranks that are given a model each, sharded with default options.
void on_two_ranks(const std::function<void(TestModel&, shard::Sharded&)>& body, shard::Options options = {},
                  bool tied = false) {
  std::vector<TestModel> models = {tables(use_loss, at::kCPU, nullptr, tied),
                                   tables(use_loss, at::kCPU, nullptr, tied)};
  run_ranks(2, [&](comm::World& world) {
    TestModel& mine = models[static_cast<std::size_t>(world.rank())];
    shard::Sharded sharded = fully_shard(*mine.module, world.groups(comm::Mesh(2, world.rank())), options);
    body(mine, sharded);
  });
}

void expect_pieces(const shard::Sharded& sharded) {
  EXPECT_EQ(sharded.usage().unsharded, Bytes(0));
  EXPECT_EQ(sharded.usage().gradients, Bytes(0));
  for (const at::Tensor& p : sharded.parameters()) EXPECT_EQ(p.dim(), 1);
}

TEST(TableUnits, AreThereUnlessTheyAreTied) {
  on_two_ranks([](TestModel&, shard::Sharded& sharded) {
    EXPECT_THAT(sharded.unit_names(),
                ElementsAre("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head", ""));
  });
  on_two_ranks(
      [](TestModel&, shard::Sharded& sharded) {
        EXPECT_THAT(sharded.unit_names(), ElementsAre("model.layers.0", "model.layers.1", "model.layers.2", ""));
      },
      {}, /*tied=*/true);
}

// Full parameters and full gradients at any time of a step, each table as large as forty layers.
Bytes peak_of_step(TestModel& model, shard::Sharded& sharded, int64_t step) {
  Bytes peak(0);
  sharded.watch_memory([&] {
    const shard::Usage usage = sharded.usage();
    peak = std::max(peak, usage.unsharded + usage.gradients);
  });
  sharded.run([&] { return model.loss(step); }).backward();
  sharded.watch_memory({});
  for (const at::Tensor& p : sharded.parameters()) p.mutable_grad().reset();
  return peak;
}

TEST(TableUnits, OneTableIsFullAtATimeAndGatheredOnceAStep) {
  const Bytes table(kVocabulary * kHidden * 4);
  const auto layers = [](const shard::Sharded& sharded) {
    int64_t elements = 0;
    for (const at::Tensor& p : sharded.parameters()) elements += 2 * p.numel();
    return Bytes((elements - 2 * kVocabulary * kHidden) * 4);
  };
  on_two_ranks([&](TestModel& model, shard::Sharded& sharded) {
    for (int64_t step = 0; step < 3; ++step) {
      const int64_t before = sharded.usage().gathers;
      const Bytes peak = peak_of_step(model, sharded, step);
      EXPECT_GE(peak, table);
      EXPECT_LT(peak, table + layers(sharded));  // of which less than half is ever there
      // The root, the tables, and every layer twice: also the last one, which does not wait for the head's forward.
      EXPECT_EQ(sharded.usage().gathers - before, 1 + 2 + 2 * kLayers);
    }
    EXPECT_EQ(sharded.usage().live_units_peak, 2);
    expect_pieces(sharded);
  });
  // With the layers alone as units, both tables and both gradients are there at once.
  shard::Options by_layer;
  by_layer.modules = {"model.layers.{*}"};
  on_two_ranks([&](TestModel& model,
                   shard::Sharded& sharded) { EXPECT_GE(peak_of_step(model, sharded, 0), Bytes(4 * table.count)); },
               by_layer);
}

struct Case {
  const char* name;
  Use use;
  const char* frozen = nullptr;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

constexpr Case kCases[] = {{"loss", use_loss},
                           {"logits", use_logits},
                           {"both in one graph", use_both},
                           {"one after the other", use_in_turns},
                           {"no head", use_no_head},
                           {"frozen embedding", use_loss, "model.embed_tokens.weight"},
                           {"frozen head", use_loss, "lm_head.weight"},
                           {"frozen head, logits", use_logits, "lm_head.weight"}};

class TableUnitsEquality : public ::testing::TestWithParam<Case> {};

TEST_P(TableUnitsEquality, OfLossesAndParameters) {
  Recipe recipe;
  recipe.model = [](int) { return tables(GetParam().use, at::kCPU, GetParam().frozen); };
  recipe.optimizer = make_adamw;
  recipe.steps = 5;
  recipe.at_end = [](shard::Sharded& sharded, TestModel&, int) { expect_pieces(sharded); };
  const Trained alone = train_alone(recipe);
  for (const auto stage : {shard::Stage::kOptimizer, shard::Stage::kGradients, shard::Stage::kParameters}) {
    for (const bool prefetch : {true, false}) {
      recipe.options.stage = stage;
      recipe.options.prefetch = prefetch;
      EXPECT_TRUE(bit_equal(train_sharded(recipe), alone)) << to_string(stage) << (prefetch ? "" : ", no prefetch");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Uses, TableUnitsEquality, ::testing::ValuesIn(kCases));

TEST(TableUnits, HoldGradientsOfMicroBatchesAlike) {
  Recipe recipe;
  recipe.model = [](int) { return tables(use_loss); };
  recipe.optimizer = make_adamw;
  recipe.micro_batches = 3;
  recipe.no_sync = true;
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST(TableUnits, LeaveNothingAfterAnEvaluationOrAFailure) {
  struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  on_two_ranks([](TestModel& model, shard::Sharded& sharded) {
    sharded.run([&] { return model.loss(0); }).backward();  // the order is known from here on
    {
      const at::NoGradGuard no_grad;
      sharded.run([&] { return model.loss(1); });
    }
    expect_pieces(sharded);
    for (const char* name : {"lm_head.weight", "model.embed_tokens.weight"}) {
      const at::Tensor table = model.module->named_parameters()[name];
      const at::Tensor before = table.grad().clone();
      const auto hook = table.register_hook([](const at::Tensor&) -> at::Tensor { throw Broken("in backward"); });
      EXPECT_THROW(sharded.run([&] { return model.loss(0); }).backward(), Broken);
      table.remove_hook(hook);
      expect_pieces(sharded);
      EXPECT_TRUE(bit_equal(table.grad(), before));
    }
  });
}

TEST(TableUnits, RefuseToRunAgainAndSayWhich) {
  for (const char* name : {"model.embed_tokens", "lm_head"}) {
    const TestModel model = tables(use_loss);
    recompute::Recompute recompute;
    recompute.attach(*model.module, {name});
    EXPECT_THAT(message_of([&] { model.loss(0); }), HasSubstr(name));
  }
}

class TableUnitsOnSim : public SimTest {};

TEST_F(TableUnitsOnSim, MayBeOffloadedByName) {
  Recipe recipe;
  recipe.optimizer = make_adamw;
  recipe.steps = 3;
  recipe.model = [](int rank) { return tables(use_loss, sim(rank)); };
  const Trained alone = train_alone(recipe);
  std::vector<std::unique_ptr<offload::Engine>> engines;
  recipe.model = [&](int rank) {
    const TestModel model = tables(use_loss, sim(rank));
    offload::Options options;
    options.min_bytes = Bytes(0);
    options.keep_last = 0;
    engines.push_back(std::make_unique<offload::Engine>(options));
    engines.back()->attach(*model.module, {"lm_head", "model.embed_tokens"});
    return model;
  };
  const Trained with = train_sharded(recipe);
  for (const auto& engine : engines) EXPECT_GT(engine->take_step_report().offloaded_bytes, Bytes(0));
  engines.clear();
  EXPECT_TRUE(bit_equal(with, alone));
}

}  // namespace
}  // namespace neap::testing
