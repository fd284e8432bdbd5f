// torch-free
#include "neap/offload/timetable.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace neap::offload {
namespace {

using namespace neap::literals;

constexpr CopyCost kLink{.ns_per_byte = 1};  // one MiB takes 2^20 ns and the margin
constexpr int64_t kMs = 1'000'000;
constexpr int64_t kTakes = 1'101'005;  // what a copy of one MiB is reckoned to take

std::vector<SaveTime> saves_every(int64_t gap_ns, int count, Bytes size = 1_MiB) {
  std::vector<SaveTime> saves;
  for (int i = 0; i < count; ++i) saves.push_back({i * gap_ns, size});
  return saves;
}

// Backward from the last position to the first.
std::vector<UseTime> uses_every(int64_t gap_ns, int count, Bytes size = 1_MiB) {
  std::vector<UseTime> uses;
  for (int i = 0; i < count; ++i) uses.push_back({i * gap_ns, size, count - 1 - i});
  return uses;
}

TEST(Timetable, LetsMemoryGoAtTheFirstSaveAfterTheCopy) {
  const auto table = Timetable::make(saves_every(2 * kMs, 10), uses_every(2 * kMs, 10), 10, kLink, kLink);
  ASSERT_TRUE(table);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(table->out_by(i), i + 1);
  EXPECT_EQ(table->in_flight(), 1_MiB);
}

TEST(Timetable, CopiesOutWaitForEachOther) {
  // Three at once, then time enough: done after one, two and three times a copy.
  std::vector<SaveTime> saves = {{0, 1_MiB}, {0, 1_MiB}, {0, 1_MiB}};
  for (int i = 1; i <= 20; ++i) saves.push_back({i * 3 * kMs / 2, 1_MiB});
  const auto table = Timetable::make(saves, uses_every(3 * kMs, 23), 23, kLink, kLink);
  ASSERT_TRUE(table);
  EXPECT_EQ(table->out_by(0), 3);  // 1.1 ms, at 1.5
  EXPECT_EQ(table->out_by(1), 4);  // 2.2 ms, at 3
  EXPECT_EQ(table->out_by(2), 5);  // 3.3 ms, at 4.5
}

TEST(Timetable, BeginsEachCopyInAtTheLastUseBeforeItsTime) {
  const auto table = Timetable::make(saves_every(2 * kMs, 6), uses_every(2 * kMs, 6), 6, kLink, kLink);
  ASSERT_TRUE(table);
  // A copy fits between two uses: each is begun one use ahead, and the first use, which nothing is ahead of, is the
  // tail.
  EXPECT_EQ(table->tail(), 1_MiB);
  for (int use = 0; use < 5; ++use) EXPECT_EQ(table->in_by(5 - use), use + 2);
  EXPECT_EQ(table->in_by(0), 6);
  EXPECT_EQ(table->ahead(), 1_MiB);
  EXPECT_EQ(table->position(0), 5);
  EXPECT_EQ(table->position(5), 0);
}

TEST(Timetable, AUseWithoutTimeBeforeItIsPreparedInTime) {
  // Every fourth use follows the one before at once: its copy has to begin before both.
  std::vector<UseTime> uses;
  int64_t now = 0;
  for (int i = 0; i < 12; ++i) {
    if (i % 4 != 0) now += 2 * kMs;
    uses.push_back({now, 1_MiB, 11 - i});
  }
  const auto table = Timetable::make(saves_every(2 * kMs, 12), uses, 12, kLink, kLink);
  ASSERT_TRUE(table);
  EXPECT_EQ(table->in_by(11 - 1), 4);  // use 3 already: the copy for use 4, which comes at the same time, is behind it
  EXPECT_EQ(table->in_by(11 - 2), 5);
  EXPECT_EQ(table->in_by(11 - 3), 5);
}

TEST(Timetable, WhatCouldNotBeInTimeIsTheTailAndDoesNotLeave) {
  // The first three uses are at once: none of them could come back in time.
  std::vector<UseTime> uses = {{0, 1_MiB, 9}, {0, 1_MiB, 8}, {0, 1_MiB, 7}};
  for (int i = 1; i <= 7; ++i) uses.push_back({i * 2 * kMs, 1_MiB, 7 - i});
  const auto table = Timetable::make(saves_every(2 * kMs, 10), uses, 10, kLink, kLink);
  ASSERT_TRUE(table);
  EXPECT_EQ(table->tail(), 3_MiB);
  EXPECT_NE(table->out_by(5), Timetable::kNever);
  for (int i = 7; i < 10; ++i) EXPECT_EQ(table->out_by(i), Timetable::kNever);
}

TEST(Timetable, SlackMovesEveryMoment) {
  const auto saves = saves_every(2 * kMs, 10);
  const auto uses = uses_every(2 * kMs, 10);
  const auto table = Timetable::make(saves, uses, 10, {1, kMs}, {1, kMs});
  ASSERT_TRUE(table);
  EXPECT_EQ(table->out_by(0), 2);
  EXPECT_EQ(table->in_by(8), 4);
  EXPECT_EQ(table->tail(), 2_MiB);
}

TEST(Timetable, AWaypointBeforeTheUnitsIsTimeToBringBackWhatWouldBeTheTail) {
  // Forward and backward come by something that takes 4 ms and saves nothing.
  auto saves = saves_every(2 * kMs, 10);
  saves.push_back({22 * kMs, Bytes(0)});
  std::vector<UseTime> uses = {{-4 * kMs, Bytes(0), 10}};
  for (const UseTime& use : uses_every(0, 3)) uses.push_back({use.at_ns, use.size, use.position + 7});
  for (const UseTime& use : uses_every(2 * kMs, 7)) uses.push_back({use.at_ns + 2 * kMs, use.size, use.position});
  const auto table = Timetable::make(saves, uses, 11, kLink, kLink);
  ASSERT_TRUE(table);
  EXPECT_EQ(table->tail(), 0_MiB);
  EXPECT_EQ(table->out_by(9), 10);  // the last storage is let go there
  EXPECT_EQ(table->in_by(10), 4);   // all three at the waypoint, beside it
  EXPECT_EQ(table->position(0), 10);
  EXPECT_TRUE(table->expects(10, Bytes(0)));
}

TEST(Timetable, ThereIsNoneWhereTheLinkIsBusyAllTheTime) {
  EXPECT_FALSE(Timetable::make(saves_every(kMs, 50), uses_every(3 * kMs, 50), 50, kLink, kLink));
  EXPECT_FALSE(Timetable::make(saves_every(3 * kMs, 50), uses_every(kMs, 50), 50, kLink, kLink));
  EXPECT_TRUE(Timetable::make(saves_every(3 * kMs, 50), uses_every(3 * kMs, 50), 50, kLink, kLink));
  EXPECT_FALSE(Timetable::make({}, uses_every(kMs, 5), 5, kLink, kLink));
  EXPECT_FALSE(Timetable::make(saves_every(kMs, 5), {}, 5, kLink, kLink));
}

TEST(Timetable, KnowsThePassItWasMadeFor) {
  const auto table = Timetable::make(saves_every(2 * kMs, 6), uses_every(2 * kMs, 6), 9, kLink, kLink);
  ASSERT_TRUE(table);
  EXPECT_EQ(table->length(), 9);
  EXPECT_TRUE(table->expects(5, 1_MiB));
  EXPECT_FALSE(table->expects(5, 2_MiB));
  EXPECT_FALSE(table->expects(6, 1_MiB));
  EXPECT_EQ(table->in_by(8), 0);  // a position that is nobody's first use
}

// Runs a random pass by its table: one copy engine each way, a copy begins when it may and the engine is free.
TEST(Timetable, APassThatGoesByItNeverWaits) {
  std::mt19937 random(7);
  int made = 0;
  for (int round = 0; round < 300; ++round) {
    const int count = 2 + static_cast<int>(random() % 60);
    std::vector<SaveTime> saves;
    std::vector<UseTime> uses(static_cast<size_t>(count));
    int64_t now = 0;
    for (int i = 0; i < count; ++i) {
      saves.push_back({now, Bytes(1 + static_cast<int64_t>(random() % 4'000'000))});
      now += static_cast<int64_t>(random() % 12'000'000);
    }
    for (int i = 0; i < count; ++i) {
      uses[static_cast<size_t>(i)] = {now, saves[static_cast<size_t>(count - 1 - i)].size, count - 1 - i};
      now += static_cast<int64_t>(random() % 12'000'000);
    }
    const auto table = Timetable::make(saves, uses, count, kLink, kLink);
    if (!table) continue;
    ++made;
    Bytes all, before;
    for (const SaveTime& save : saves) all += save.size;
    int64_t free_at = 0;
    for (int i = 0; i < count; ++i) {
      const SaveTime& save = saves[static_cast<size_t>(i)];
      before += save.size;
      if (before > all - table->tail()) break;
      free_at = std::max(free_at, save.at_ns) + save.size.count;
      if (table->out_by(i) == Timetable::kNever) continue;
      EXPECT_LE(free_at, saves[static_cast<size_t>(table->out_by(i))].at_ns);
    }
    free_at = 0;
    int64_t begun = 0;
    Bytes used;
    std::vector<int64_t> here(uses.size());
    for (const UseTime& use : uses) {
      for (; begun < table->in_by(use.position); ++begun) {
        const UseTime& next = uses[static_cast<size_t>(begun)];
        used += next.size;
        if (used <= table->tail()) continue;
        free_at = std::max(free_at, use.at_ns) + next.size.count;
        here[static_cast<size_t>(begun)] = free_at;
      }
      const auto index = static_cast<size_t>(&use - uses.data());
      ASSERT_GT(begun, static_cast<int64_t>(index));
      EXPECT_LE(here[index], use.at_ns);
    }
  }
  EXPECT_GT(made, 100);
}

TEST(Slack, GrowsWithStallsAndFades) {
  Slack slack;
  WaitSummary pass;
  pass.span_ns = 1000 * kTakes;
  slack.learn(pass);
  EXPECT_EQ(slack.ns(), 0);
  pass.add(2 * kTakes, 1_MiB);
  slack.learn(pass);
  EXPECT_EQ(slack.ns(), 2 * kTakes);
  slack.learn(pass);
  EXPECT_EQ(slack.ns(), 4 * kTakes);
  for (int i = 0; i < 10; ++i) slack.learn(pass);
  EXPECT_EQ(slack.ns(), pass.span_ns / 16);
  pass = {};
  pass.span_ns = 1000 * kTakes;
  for (int i = 0; i < 1000; ++i) slack.learn(pass);
  EXPECT_LT(slack.ns(), 100);
}

}  // namespace
}  // namespace neap::offload
