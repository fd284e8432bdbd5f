// Offload never changes a bit: losses, every gradient and the parameters of ten training steps are those of the run
// without it, for the models people train and for one of hostile shapes, on a link that keeps up and on one that does
// not, in every mode, with the hazard checker on.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>

#include "neap/offload/engine.h"
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
  config.num_hidden_layers = 5;
  config.qk_norm = qk_norm;
  return decoder(name, config, dtype, /*length=*/32);
}

Model deepseek(const char* name, at::ScalarType dtype) {
  return decoder(name, small_deepseek(/*vocabulary=*/97), dtype, /*length=*/32);
}

struct Way {
  const char* name;
  double gbps;  // of both directions; 0: memcpy speed
  std::function<void(offload::Options&)> set;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

class BitEquality : public SimTest, public ::testing::WithParamInterface<std::tuple<Model, Way>> {
 protected:
  static constexpr int64_t kSteps = 10;
};

TEST_P(BitEquality, OverTenSteps) {
  const auto& [kind, way] = GetParam();
  TrainingRecord plain, with;
  {
    const auto [model, loss] = kind.make(sim());
    plain = train(*model, loss, kSteps);
  }
  if (way.gbps > 0) throttle_copies(way.gbps, way.gbps);
  offload::Options options;
  options.min_bytes = Bytes(0);
  way.set(options);
  const auto [model, loss] = kind.make(sim());
  offload::Engine engine(options);
  engine.attach(*model);
  int64_t moved = 0;
  with = train(*model, loss, kSteps, [&](int64_t) { moved += engine.take_step_report().offloaded_bytes.count; });
  EXPECT_TRUE(bit_equal(plain, with));
  EXPECT_GT(moved, 0);
}

class SimAndCpu : public SimTest, public ::testing::WithParamInterface<Model> {};

TEST_P(SimAndCpu, TrainAlikeToTheLastBit) {
  const auto& kind = GetParam();
  TrainingRecord cpu;
  {
    const auto [model, loss] = kind.make(c10::kCPU);
    cpu = train(*model, loss, 3);
  }
  const auto [model, loss] = kind.make(sim());
  EXPECT_TRUE(bit_equal(cpu, train(*model, loss, 3)));
}

void everything_leaves(offload::Options& options) {
  options.keep_last = 0;
  options.max_in_flight = Bytes(0);
  options.prefetch = offload::Layers{1};
}

const auto kModels = ::testing::Values(
    llama("Llama", "llama", false, at::kFloat), llama("LlamaBf16", "llama", false, at::kBFloat16),
    llama("Qwen3", "qwen3", true, at::kFloat), deepseek("Deepseek", at::kFloat),
    deepseek("DeepseekBf16", at::kBFloat16), hostile("Hostile", at::kFloat), hostile("HostileBf16", at::kBFloat16));

INSTANTIATE_TEST_SUITE_P(Models, SimAndCpu, kModels, [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Models, BitEquality,
    ::testing::Combine(
        kModels,
        ::testing::Values(
            Way{"LastUnitStays", 0,
                [](offload::Options& options) { options.keep_last = 1, options.max_in_flight = Bytes(0); }},
            Way{"EverythingLeaves", 0, everything_leaves}, Way{"EverythingLeavesOnASlowLink", 0.02, everything_leaves},
            Way{"AutomaticOnASlowLink", 0.05, [](offload::Options& options) { options.keep_last = 0; }},
            Way{"Budget", 0,
                [](offload::Options& options) { options.keep_last = 0, options.device_budget = Bytes(16 << 10); }},
            Way{"Synchronous", 0, [](offload::Options& options) { options.mode = offload::Mode::kSync; }})),
    [](const auto& info) { return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name; });

}  // namespace
}  // namespace neap::testing
