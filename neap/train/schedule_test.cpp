// torch-free
#include "neap/train/schedule.h"

#include <gtest/gtest.h>

namespace neap::train {
namespace {

OptimSection optim(Schedule schedule, int64_t warmup) {
  OptimSection section;
  section.lr = 2.0;
  section.final_ratio = 0.25;
  section.schedule = schedule;
  section.warmup = warmup;
  return section;
}

TEST(LearningRate, RisesLinearlyToThePeakAtTheWarmUpsLastStep) {
  for (const Schedule schedule : {Schedule::kConstant, Schedule::kLinear, Schedule::kCosine}) {
    const LearningRate rate(optim(schedule, 4), 10);
    EXPECT_DOUBLE_EQ(rate.at(0), 0.5);
    EXPECT_DOUBLE_EQ(rate.at(1), 1.0);
    EXPECT_DOUBLE_EQ(rate.at(3), 2.0);
  }
}

TEST(LearningRate, EndsAtTheFinalRatioInTheLastStep) {
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kLinear, 0), 5).at(4), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kCosine, 2), 9).at(8), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kConstant, 2), 9).at(8), 2.0);
}

TEST(LearningRate, PassesThroughTheMiddle) {
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kLinear, 0), 5).at(2), 1.25);
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kCosine, 0), 5).at(2), 1.25);
  EXPECT_GT(LearningRate(optim(Schedule::kCosine, 0), 5).at(1), LearningRate(optim(Schedule::kLinear, 0), 5).at(1));
}

TEST(LearningRate, ARunOfOneStepHasThePeak) {
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kCosine, 0), 1).at(0), 2.0);
  EXPECT_DOUBLE_EQ(LearningRate(optim(Schedule::kLinear, 1), 1).at(0), 2.0);
}

}  // namespace
}  // namespace neap::train
