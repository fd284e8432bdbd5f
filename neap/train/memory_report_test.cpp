// torch-free
#include "neap/train/memory_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace neap::train {
namespace {

using namespace literals;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

MemoryUse use() {
  MemoryUse use;
  use.parameters = 100_MiB;
  use.gradients = 40_MiB;
  use.optimizer = 200_MiB;
  use.peak = 900_MiB;
  use.capacity = 1_GiB;
  return use;
}

TEST(MemoryReport, ActivationsAreWhatThePeakHoldsBesideTheModelsState) {
  EXPECT_EQ(use().activations(), 560_MiB);
  MemoryUse small = use();
  small.peak = 10_MiB;
  EXPECT_EQ(small.activations(), 0_MiB);
  small.peak = std::nullopt;
  EXPECT_EQ(small.activations(), std::nullopt);
}

TEST(MemoryReport, SaysWhereWhatAndHowMuch) {
  const std::string text = describe({.when = "the forward of step 1", .reason = "asked for 48 MiB", .use = use()}, {});
  EXPECT_THAT(text, StartsWith("out of memory in the forward of step 1: asked for 48 MiB\n"));
  EXPECT_THAT(text, HasSubstr("900.00 MiB at the peak of 1.00 GiB"));
  EXPECT_THAT(text, HasSubstr("100.00 MiB"));
  EXPECT_THAT(text, HasSubstr("activations and workspace   560.00 MiB"));
}

TEST(MemoryReport, OffloadIsTheFirstRemedyWhenItIsOff) {
  RunConfig config;
  config.train.batch = 9;
  config.train.accumulation = 2;
  EXPECT_THAT(remedies(use(), config),
              ElementsAre(StartsWith("offload.mode: async (now off)"), StartsWith("recompute.mode: full (now none)"),
                          StartsWith("train.batch: 3 with train.accumulation: 6"),
                          StartsWith("train.dtype: bfloat16 (now float32)")));
}

TEST(MemoryReport, WithOffloadOnNamesTheOptionsThatStillKeepMemory) {
  RunConfig config;
  offload::Options& options = config.offload.options;
  options.mode = offload::Mode::kAsync;
  options.device_budget = 1_GiB;
  options.host_limit = 2_GiB;
  config.offload.layers = {"0-3"};
  const auto found = remedies(use(), config);
  EXPECT_THAT(found, Contains(StartsWith("offload.modules and offload.layers")));
  EXPECT_THAT(found, Contains(StartsWith("offload.device_budget: 0 (now 1.00 GiB)")));
  EXPECT_THAT(found, Contains(StartsWith("offload.min_bytes")));
  EXPECT_THAT(found, Contains(StartsWith("offload.prefetch: 1")));
  EXPECT_THAT(found, Contains(StartsWith("offload.device_limit")));
  EXPECT_THAT(found, Contains(StartsWith("offload.max_in_flight: 64MiB")));
  EXPECT_THAT(found, Contains(StartsWith("offload.host_limit")));
  EXPECT_THAT(found, Contains(StartsWith("train.sequence: 256 (now 512)")));

  options = {.mode = offload::Mode::kAsync,
             .device_budget = 0_MiB,
             .min_bytes = 0_MiB,
             .prefetch = offload::Layers{1},
             .keep_last = 0,
             .max_in_flight = 16_MiB,
             .device_limit = 1_GiB};
  config.offload.layers.clear();
  config.recompute.mode = RecomputeMode::kSelective;
  EXPECT_THAT(remedies(use(), config),
              ElementsAre(StartsWith("recompute.mode: full (now selective)"), StartsWith("train.sequence"),
                          StartsWith("train.dtype: bfloat16 (now float32)")));
  config.recompute.mode = RecomputeMode::kFull;
  config.train.dtype = Dtype::kBfloat16;
  EXPECT_THAT(remedies(use(), config), ElementsAre(StartsWith("train.sequence")));
}

TEST(MemoryReport, SaysSoWhenNoSettingOfActivationsCanHelp) {
  MemoryUse large = use();
  large.capacity = 399_MiB;
  const auto found = remedies(large, {});
  ASSERT_EQ(found.size(), 1);
  EXPECT_THAT(found[0], HasSubstr("alone need 400.00 MiB of the device's 399.00 MiB"));
  EXPECT_THAT(found, Not(Contains(HasSubstr("offload"))));
}

}  // namespace
}  // namespace neap::train
