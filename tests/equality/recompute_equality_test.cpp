// Recomputation never changes a bit, alone and with offload: losses, every gradient and the parameters of ten training
// steps are those of the plain run, on the CPU and on sim with the hazard checker on, for whole layers, chosen ones,
// parts of them, and parts within recomputed layers; and after each step no byte is left.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "testing/deepseek_config.h"
#include "testing/llama_config.h"
#include "testing/sim_fixture.h"
#include "testing/small_models.h"
#include "tests/equality/equality_models.h"

namespace neap::testing {
namespace {

Model llama(const char* name, const char* model_type, bool qk_norm, at::ScalarType dtype) {
  models::ModelConfig config = small_llama(/*vocabulary=*/97);
  config.model_type = model_type;
  config.intermediate_size = 96;
  config.num_hidden_layers = 4;
  config.qk_norm = qk_norm;
  return decoder(name, config, dtype, /*length=*/16);
}

// Four layers, of which one has an mlp and the others experts.
Model deepseek() {
  models::ModelConfig config = small_deepseek(/*vocabulary=*/97);
  config.num_hidden_layers = 4;
  return decoder("Deepseek", config, at::kFloat, /*length=*/16);
}

// Which units run again, and how many regions that makes a step with four layers.
struct Choice {
  const char* name;
  std::vector<std::string> patterns;
  int64_t regions;
};

void PrintTo(const Choice& choice, std::ostream* out) { *out << choice.name; }

enum class Offloaded { kNo, kLayers, kParts };

// A step's bytes are seen between steps; what lives then is the model and its momentum.
class RecomputeEquality : public SimTest,
                          public ::testing::WithParamInterface<std::tuple<Model, Choice, Offloaded, bool>> {
 protected:
  static constexpr int64_t kSteps = 10;
};

TEST_P(RecomputeEquality, OverTenSteps) {
  const auto& [kind, choice, offloaded, on_cpu] = GetParam();
  const c10::Device device = on_cpu ? c10::Device(c10::kCPU) : sim();
  TrainingRecord plain;
  {
    const auto [model, loss] = kind.make(device);
    plain = train(*model, loss, kSteps);
  }
  const auto [model, loss] = kind.make(device);
  offload::Options options;
  options.min_bytes = Bytes(0), options.keep_last = 0, options.max_in_flight = Bytes(0);
  options.prefetch = offload::Layers{1};
  std::optional<offload::Engine> engine;
  if (offloaded != Offloaded::kNo) {
    engine.emplace(options);
    engine->attach(*model, offloaded == Offloaded::kParts ? std::vector<std::string>{"model.layers.{*}.mlp"}
                                                          : std::vector<std::string>{});
  }
  recompute::Recompute recompute;
  recompute.attach(*model, choice.patterns);
  std::optional<int64_t> level;
  int64_t moved = 0;
  const auto with = train(*model, loss, kSteps, [&](int64_t step) {
    const auto report = recompute.take_step_report();
    EXPECT_EQ(report.regions, choice.regions) << step;
    EXPECT_GE(report.reruns, choice.regions) << step;
    EXPECT_GT(report.bytes_not_kept, Bytes(0)) << step;
    if (engine) moved += engine->take_step_report().offloaded_bytes.count;
    synchronize();
    EXPECT_EQ(live_bytes(), level.value_or(live_bytes())) << step;
    level = live_bytes();
  });
  EXPECT_TRUE(bit_equal(plain, with));
  if (offloaded == Offloaded::kLayers) {
    EXPECT_GT(moved, 0);
  }
}

std::string name_of(const ::testing::TestParamInfo<RecomputeEquality::ParamType>& info) {
  const auto& [model, choice, offloaded, on_cpu] = info.param;
  static constexpr const char* kNames[] = {"", "AndOffload", "AndOffloadOfMlps"};
  return std::string(model.name) + choice.name + kNames[static_cast<int>(offloaded)] + (on_cpu ? "OnCpu" : "OnSim");
}

const Choice kAllLayers{"AllLayers", {}, 4};
const Choice kFirstThree{"FirstThree", {"0-2"}, 3};
const Choice kMlps{"Mlps", {"model.layers.{*}.mlp"}, 4};
const Choice kNested{"LayersAndMlpsInside", {"model.layers.{*}", "model.layers.{*}.mlp"}, 8};

INSTANTIATE_TEST_SUITE_P(Decoders, RecomputeEquality,
                         ::testing::Combine(::testing::Values(llama("Llama", "llama", false, at::kFloat),
                                                              llama("Qwen3", "qwen3", true, at::kFloat)),
                                            ::testing::Values(kAllLayers, kFirstThree, kMlps, kNested),
                                            ::testing::Values(Offloaded::kNo, Offloaded::kLayers, Offloaded::kParts),
                                            ::testing::Bool()),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Bfloat16, RecomputeEquality,
                         ::testing::Combine(::testing::Values(llama("LlamaBf16", "llama", false, at::kBFloat16)),
                                            ::testing::Values(kAllLayers, kNested),
                                            ::testing::Values(Offloaded::kNo, Offloaded::kLayers), ::testing::Bool()),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Experts, RecomputeEquality,
                         ::testing::Combine(::testing::Values(deepseek()), ::testing::Values(kAllLayers, kNested),
                                            ::testing::Values(Offloaded::kNo, Offloaded::kLayers, Offloaded::kParts),
                                            ::testing::Bool()),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Hostile, RecomputeEquality,
                         ::testing::Combine(::testing::Values(hostile("Hostile", at::kFloat),
                                                              hostile("HostileBf16", at::kBFloat16)),
                                            ::testing::Values(kAllLayers, kFirstThree),
                                            ::testing::Values(Offloaded::kNo, Offloaded::kLayers), ::testing::Bool()),
                         name_of);

// What each way costs at its worst moment, on a model whose activations outweigh all else.
class RecomputePeak : public SimTest {
 protected:
  static int64_t peak(bool recomputed, bool offloaded) {
    models::ModelConfig config;
    config.vocab_size = 97, config.hidden_size = 32, config.intermediate_size = 128, config.num_hidden_layers = 8;
    config.num_attention_heads = 4, config.num_key_value_heads = 4, config.head_dim = 8;
    const auto model = models::make_model(config, on_sim(), 3);
    std::optional<offload::Engine> engine;
    std::optional<recompute::Recompute> recompute;
    if (offloaded) {
      offload::Options options;
      options.min_bytes = Bytes(0), options.keep_last = 0, options.max_in_flight = Bytes(0);
      options.prefetch = offload::Layers{1};
      engine.emplace(options);
      engine->attach(*model);
    }
    if (recomputed) {
      recompute.emplace();
      recompute->attach(*model);
    }
    const auto ids = (at::arange(4 * 65, at::kLong) * 11).remainder(97).view({4, 65}).to(sim());
    int64_t worst = 0;
    for (int i = 0; i < 3; ++i) {
      synchronize();
      const int64_t before = live_bytes();
      control().reset_peak(0);
      model->loss(ids.narrow(1, 0, 64), ids.narrow(1, 1, 64)).backward();
      synchronize();
      worst = control().memory(0).requested_peak - before;
    }
    return worst;
  }
};

TEST_F(RecomputePeak, IsLowerWithEachAndLowestWithBoth) {
  const int64_t plain = peak(false, false), recomputed = peak(true, false), both = peak(true, true);
  // Eight layers' tensors against one layer's and eight inputs.
  EXPECT_LT(recomputed, plain / 3);
  // With the inputs away, too: one layer's tensors, and two inputs at a time.
  const int64_t input = 4 * 64 * 32 * 4;
  EXPECT_LE(both, recomputed - 4 * input);
}

}  // namespace
}  // namespace neap::testing
