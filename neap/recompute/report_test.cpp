// torch-free
#include "neap/recompute/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace neap::recompute {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(RecomputeReport, IsSilentAboutAStepAsItShouldBe) {
  StepReport report{.regions = 2, .reruns = 2, .saved_tensors = 9, .bytes_not_kept = Bytes(64), .idle_units = {}};
  EXPECT_THAT(report.findings(), IsEmpty());
  EXPECT_THAT(StepReport().findings(), IsEmpty());
  EXPECT_EQ(to_string(report), "recompute: 2 forward passes of units, 9 saved tensors (64 B) not kept, 2 run again");
}

TEST(RecomputeReport, NamesUnitsThatNothingWentThrough) {
  StepReport report;
  report.idle_units = {"model.layers.3"};
  EXPECT_THAT(report.findings(), ElementsAre("recompute: 1 chosen unit, model.layers.3: no forward pass with gradients "
                                             "went through"));
  report.idle_units.emplace_back("model.layers.4");
  EXPECT_THAT(report.findings(), ElementsAre(HasSubstr("2 chosen units, model.layers.3 first: no forward")));
}

TEST(RecomputeReport, SaysWhenNothingIsGained) {
  const StepReport report{.regions = 1, .reruns = 1, .saved_tensors = 1, .bytes_not_kept = Bytes(0), .idle_units = {}};
  EXPECT_THAT(report.findings(), ElementsAre(HasSubstr("frees no memory")));
}

}  // namespace
}  // namespace neap::recompute
