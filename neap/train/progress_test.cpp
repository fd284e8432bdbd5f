// torch-free
#include "neap/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "neap/train/test_support.h"

namespace neap::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Progress, NumbersAreWrittenAsPeopleReadThem) {
  EXPECT_EQ(fixed(3.14159, 2), "3.14");
  EXPECT_EQ(fixed(-0.5, 0), "-0");
  EXPECT_EQ(fixed(std::numeric_limits<double>::quiet_NaN(), 2), "nan");
  EXPECT_EQ(fixed(-std::numeric_limits<double>::infinity(), 2), "-inf");
  EXPECT_EQ(fixed(std::numeric_limits<double>::max(), 1).size(), 311);
  EXPECT_EQ(format_ms(12.34), "12.3 ms");
  EXPECT_EQ(format_ms(4560), "4.56 s");
  EXPECT_EQ(format_ms(125'000), "2 min 5 s");
}

TEST(Progress, PlainOutputIsOneLineAStepWithoutEscapes) {
  std::ostringstream out;
  {
    Progress progress(out, /*terminal=*/false, 2);
    progress.step(step(1, 3.5, 100));
    progress.step(step(2, 2.5, 40));
  }
  EXPECT_EQ(out.str(),
            "step 1/2  loss 3.5000  grad_norm 7.000  lr 0.00e+00  1000 tok/s  step 100.0 ms\n"
            "step 2/2  loss 2.5000  grad_norm 5.000  lr 0.00e+00  2500 tok/s  step 40.0 ms\n");
}

TEST(Progress, ATerminalGetsABarThatIsGoneAtTheEnd) {
  std::ostringstream out;
  {
    Progress progress(out, /*terminal=*/true, 2);
    progress.step(step(1, 3.5, 3000));
    EXPECT_THAT(out.str(), HasSubstr("[###############...............] 1/2  3.00 s left"));
    progress.step(step(2, 2.5, 40));
  }
  EXPECT_THAT(out.str(), ::testing::EndsWith("\r\033[K"));
  EXPECT_THAT(out.str(), Not(HasSubstr("2/2  0")));
}

TEST(Progress, TheFinalTableComparesPlannedAndMeasured) {
  const std::string table = final_table(two_steps());
  EXPECT_THAT(table, HasSubstr("99.00 MiB (R = 0.9900)"));
  EXPECT_THAT(table, HasSubstr("2 (finished)"));
  EXPECT_THAT(table, HasSubstr("3.5000 → 2.5000"));
  EXPECT_THAT(final_table(RunSummary{}), Not(HasSubstr("planned")));
}

TEST(Progress, TheFinalTableSaysWhatTheLargestPeakWasMadeOf) {
  RunSummary summary = two_steps();
  EXPECT_THAT(final_table(summary), Not(HasSubstr("gradients")));
  const PeakParts parts{.piece = "backward",
                        .place = "in the backward of layers.3",
                        .parameters = Bytes(10 << 20),
                        .gradients = Bytes(4 << 20),
                        .optimizer = Bytes(20 << 20),
                        .activations = Bytes(3 << 20),
                        .workspace = Bytes(1 << 20)};
  summary.steps[0].device_peak = parts.total();
  summary.steps[0].peak_parts = parts;
  summary.steps[1].device_peak = Bytes(30 << 20);
  EXPECT_EQ(summary.fullest_step(), &summary.steps[0]);
  const std::string table = final_table(summary);
  EXPECT_THAT(table, HasSubstr("  reached in            the backward of step 1, in the backward of layers.3\n"));
  EXPECT_THAT(table, HasSubstr("  parameters            10.00 MiB\n"));
  EXPECT_THAT(table, HasSubstr("  gradients             4.00 MiB\n"));
  EXPECT_THAT(table, HasSubstr("  optimizer state       20.00 MiB\n"));
  EXPECT_THAT(table, HasSubstr("  activations           3.00 MiB\n"));
  EXPECT_THAT(table, HasSubstr("  workspace             1.00 MiB\n"));
}

TEST(Progress, TheFinalTableSaysWhatRecomputationDid) {
  RunSummary summary = two_steps();
  EXPECT_THAT(final_table(summary), Not(HasSubstr("recomputed")));
  for (StepMetrics& metrics : summary.steps) metrics.reruns = 4, metrics.bytes_not_kept = Bytes(3 << 20);
  EXPECT_THAT(final_table(summary), HasSubstr("8 units, 3.00 MiB not kept in a step"));
}

TEST(Progress, ShowsUtilisationAndTheLossOnHeldOutDataWhereKnown) {
  StepMetrics metrics = step(1, 3.5, 100);
  EXPECT_THAT(step_line(metrics, 2), Not(HasSubstr("mfu")));
  metrics.mfu = 0.4123;
  metrics.eval_loss = 3.25;
  metrics.eval_ms = 12;
  EXPECT_THAT(step_line(metrics, 2), HasSubstr("  mfu 41.2%"));
  EXPECT_THAT(step_line(metrics, 2), HasSubstr("  eval_loss 3.2500 (12.0 ms)"));
  RunSummary summary = two_steps();
  EXPECT_THAT(final_table(summary), Not(HasSubstr("loss on data.eval")));
  summary.steps[0].eval_loss = 9;
  EXPECT_EQ(summary.eval_loss(), 9);
  summary.steps[1].eval_loss = 3.25;
  summary.steps[1].mfu = 0.5;
  EXPECT_THAT(final_table(summary), HasSubstr("loss on data.eval       3.2500"));
  EXPECT_THAT(final_table(summary), HasSubstr("50.0% of what the devices can do"));
}

}  // namespace
}  // namespace neap::train
