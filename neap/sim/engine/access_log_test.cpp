// torch-free
#include "neap/sim/engine/access_log.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace neap::sim {
namespace {

std::size_t conflicts(const AccessLog& log, const Access& next, const VectorClock& seen) {
  return log.conflicts(next, seen).size();
}

TEST(VectorClock, KeepsStreamsBeyondTheInlineOnes) {
  VectorClock a, b;
  a.set(3, 7);
  a.set(40, 5);
  b.set(3, 9);
  EXPECT_EQ(a.at(40), 5U);
  EXPECT_EQ(a.at(41), 0U);
  EXPECT_TRUE(b.merge(a));
  EXPECT_EQ(b.at(3), 9U);
  EXPECT_EQ(b.at(40), 5U);
  EXPECT_FALSE(b.merge(a)) << "nothing new the second time";
}

TEST(AccessLog, TwoReadsNeverConflict) {
  AccessLog log;
  log.add({0, false, 1, 0, 100, "a"}, {});
  EXPECT_EQ(conflicts(log, {1, false, 1, 0, 100, "b"}, {}), 0U);
  EXPECT_EQ(conflicts(log, {1, true, 1, 0, 100, "b"}, {}), 1U);
}

TEST(AccessLog, OnlyOverlappingBytesConflict) {
  AccessLog log;
  log.add({0, true, 1, 0, 100, "a"}, {});
  EXPECT_EQ(conflicts(log, {1, true, 1, 100, 200, "b"}, {}), 0U);
  EXPECT_EQ(conflicts(log, {1, true, 1, 99, 200, "b"}, {}), 1U);
}

TEST(AccessLog, KnowledgeOfTheEarlierOperationOrdersTheLater) {
  AccessLog log;
  log.add({0, true, 5, 0, 100, "a"}, {});
  VectorClock seen;
  seen.set(0, 4);
  EXPECT_EQ(conflicts(log, {1, false, 1, 0, 100, "b"}, seen), 1U);
  seen.set(0, 5);
  EXPECT_EQ(conflicts(log, {1, false, 1, 0, 100, "b"}, seen), 0U);
}

TEST(AccessLog, RepeatedUseByOneStreamTakesOneEntry) {
  AccessLog log;
  log.add({0, true, 1, 0, 100, "write"}, {});
  for (uint64_t i = 2; i < 50; ++i) log.add({0, false, i, 0, 100, "read"}, {});
  EXPECT_EQ(log.accesses().size(), 2U);
}

TEST(AccessLog, AWriteReplacesTheBytesItCoversAndLeavesTheRest) {
  AccessLog log;
  log.add({0, false, 1, 0, 100, "read"}, {});
  log.add({0, true, 2, 40, 60, "write"}, {});
  ASSERT_EQ(log.accesses().size(), 3U);
  EXPECT_EQ(conflicts(log, {1, true, 1, 0, 40, "x"}, {}), 1U);
  EXPECT_EQ(conflicts(log, {1, true, 1, 60, 100, "x"}, {}), 1U);
  VectorClock seen;
  seen.set(0, 1);
  EXPECT_EQ(conflicts(log, {1, true, 1, 0, 40, "x"}, seen), 0U);
  EXPECT_EQ(conflicts(log, {1, true, 1, 50, 51, "x"}, seen), 1U);
}

TEST(AccessLog, KeepsAnUnorderedAccessThatALaterOneCovers) {
  AccessLog log;
  log.add({0, true, 1, 0, 100, "a"}, {});
  log.add({1, true, 1, 0, 100, "b"}, {});  // a hazard, reported elsewhere; both still matter to a third stream
  EXPECT_EQ(conflicts(log, {2, true, 1, 0, 100, "c"}, {}), 2U);
}

// Against a checker that never forgets: same verdict on every access of random programs.
TEST(AccessLog, ForgettingNeverChangesAVerdict) {
  std::mt19937 random(7);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int program = 0; program < 200; ++program) {
    AccessLog log;
    std::vector<Access> all;
    std::vector<VectorClock> clocks(3);
    std::vector<uint64_t> numbers(3, 0);
    for (int step = 0; step < 60; ++step) {
      const int stream = pick(3);
      if (pick(3) == 0) clocks[static_cast<std::size_t>(stream)].merge(clocks[static_cast<std::size_t>(pick(3))]);
      VectorClock& seen = clocks[static_cast<std::size_t>(stream)];
      const uint64_t number = ++numbers[static_cast<std::size_t>(stream)];
      seen.set(stream, number);
      const auto begin = static_cast<std::size_t>(pick(10));
      const Access next{stream, pick(2) == 0, number, begin, begin + 1 + static_cast<std::size_t>(pick(5)), "x"};
      bool expected = false;
      for (const Access& a : all)
        expected |= a.stream != stream && (a.write || next.write) && a.begin < next.end && next.begin < a.end &&
                    seen.at(a.stream) < a.number;
      // A program is followed up to its first hazard: behind it both checkers may differ in what they repeat.
      ASSERT_EQ(conflicts(log, next, seen) > 0, expected) << "program " << program << " step " << step;
      if (expected) break;
      log.add(next, seen);
      all.push_back(next);
    }
    EXPECT_LE(log.accesses().size(), 3U * 2U * 15U);
  }
}

}  // namespace
}  // namespace neap::sim
