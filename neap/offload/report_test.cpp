// torch-free
#include "neap/offload/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/offload/peak_watch.h"

namespace neap::offload {
namespace {

using namespace neap::literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(StepReport, RatioIsMeasuredOverPlanned) {
  StepReport report;
  EXPECT_EQ(report.ratio(), 1);
  report.planned_drop = 100_MiB;
  report.measured_drop = 75_MiB;
  EXPECT_EQ(report.ratio(), 0.75);
}

TEST(StepReport, SaysWhatKeptThePeakFromFalling) {
  StepReport report;
  report.planned_drop = 100_MiB;
  report.away_at_peak = 90_MiB;
  report.peak_piece = "in the backward of layers.1";
  EXPECT_THAT(report.findings(), IsEmpty());

  report.still_referenced = {{"layers.3", 4_MiB}};
  report.never_hit = {"layers.7"};
  report.late_reloads = 2;
  report.reloaded_storages = 9;
  EXPECT_THAT(report.findings(),
              ElementsAre(AllOf(HasSubstr("layers.3"), HasSubstr("4.00 MiB"), HasSubstr("another owner")),
                          HasSubstr("unit layers.7 saved nothing"), HasSubstr("2 of 9 reloads")));
}

TEST(StepReport, SaysWhenThePeakLiesElsewhere) {
  StepReport report;
  report.planned_drop = 100_MiB;
  report.away_at_peak = 3_MiB;
  report.peak_piece = "in the forward of layers.0";
  EXPECT_THAT(report.findings(), ElementsAre(AllOf(HasSubstr("in the forward of layers.0"), HasSubstr("3.00 MiB"),
                                                   HasSubstr("cannot lower it"))));
  EXPECT_THAT(to_string(report), HasSubstr("note: the peak was reached"));
}

TEST(PeakWatch, RemembersThePieceInWhichThePeakRoseLast) {
  using enum Piece::Kind;
  PeakWatch watch;
  watch.look(10_B, 0_B, {kForward, 0});
  watch.look(50_B, 7_B, {kAfterForward, 0});
  watch.look(50_B, 9_B, {kForward, 1});
  watch.look(50_B, 9_B, {});
  EXPECT_EQ(watch.at_peak().kind, kForward);
  EXPECT_EQ(watch.at_peak().unit, 0);
  EXPECT_EQ(watch.away(), 7_B);
}

TEST(PeakWatch, AResetPeakIsANewOne) {
  using enum Piece::Kind;
  PeakWatch watch;
  watch.look(50_B, 0_B, {kForward, 0});
  watch.look(20_B, 1_B, {kForward, 1});
  watch.look(30_B, 2_B, {});
  EXPECT_EQ(watch.at_peak().unit, 1);
  EXPECT_EQ(watch.away(), 2_B);
}

}  // namespace
}  // namespace neap::offload
