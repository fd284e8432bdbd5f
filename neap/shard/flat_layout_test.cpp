// torch-free
#include "neap/shard/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <random>
#include <tuple>

#include "neap/base/error.h"

namespace neap::shard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<FlatItem> items(const std::vector<int64_t>& sizes) {
  std::vector<FlatItem> out;
  for (const int64_t numel : sizes) out.push_back({.numel = numel});
  return out;
}

// What every layout has to fulfil, whatever it was made of.
void check_layout(const FlatLayout& layout, const std::vector<FlatItem>& from, int64_t alignment) {
  ASSERT_EQ(layout.size(), from.size());
  EXPECT_EQ(layout.shard_numel() % alignment, 0);
  int64_t end = 0, used = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(layout.offset(i) % alignment, 0) << "parameter " << i;
    EXPECT_GE(layout.offset(i), end) << "parameter " << i;
    end = layout.offset(i) + from[i].numel;
    used += from[i].numel;
    // The pieces of all ranks are the parameter, in order and without a gap.
    int64_t next = 0;
    for (int64_t rank = 0; rank < layout.ranks(); ++rank) {
      const Piece piece = layout.piece(i, rank);
      const auto span = layout.items_of(rank);
      if (piece.numel() == 0) {
        EXPECT_EQ(piece, Piece{});
        continue;
      }
      EXPECT_EQ(piece.begin, next);
      EXPECT_EQ(rank * layout.shard_numel() + piece.shard_offset, layout.offset(i) + piece.begin);
      EXPECT_LE(piece.shard_offset + piece.numel(), layout.shard_numel());
      EXPECT_EQ(piece.begin % from[i].block, 0) << "parameter " << i << " is cut within a block";
      EXPECT_TRUE(span.first <= i && i < span.last);
      next = piece.end;
    }
    EXPECT_EQ(next, from[i].numel);
  }
  EXPECT_LE(end, layout.total());
  int64_t padding = 0;
  for (const auto& gap : layout.gaps()) padding += gap.end - gap.begin;
  EXPECT_EQ(padding, layout.padding());
  EXPECT_EQ(layout.padding(), layout.total() - used);
}

class Shapes : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(Shapes, OfEveryKindAreCutIntoTheWholeParameterInOrder) {
  const auto [world, alignment] = GetParam();
  // [], [0], [0,4], [1], [3], [5,7], [world*k+1, m]
  const std::vector<int64_t> kinds = {1, 0, 0, 1, 3, 35, (world * 3 + 1) * 5};
  check_layout(FlatLayout(items(kinds), world, alignment), items(kinds), alignment);
  std::mt19937 random(static_cast<unsigned>(world * 100 + alignment));
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> sizes(random() % 9);
    for (int64_t& size : sizes) size = kinds[random() % kinds.size()];
    check_layout(FlatLayout(items(sizes), world, alignment), items(sizes), alignment);
  }
}

TEST_P(Shapes, AreNeverCutWithinABlock) {
  const auto [world, alignment] = GetParam();
  std::mt19937 random(static_cast<unsigned>(world * 7 + alignment));
  for (int round = 0; round < 50; ++round) {
    std::vector<FlatItem> from(1 + random() % 6);
    for (FlatItem& item : from) {
      item.block = std::vector<int64_t>{1, 1, 3, 5, 8, 32}[random() % 6];
      item.numel = item.block * static_cast<int64_t>(random() % 40);
    }
    check_layout(FlatLayout(from, world, alignment), from, alignment);
  }
}

INSTANTIATE_TEST_SUITE_P(FlatLayout, Shapes,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7, 16), ::testing::Values(1, 4, 16)));

TEST(FlatLayout, TwoParametersOfAlignedSizesHaveNoPadding) {
  const FlatLayout layout(items({1 << 20, 1 << 20}), 2, 16);
  EXPECT_EQ(layout.padding(), 0);
  EXPECT_EQ(layout.shard_numel(), 1 << 20);
  EXPECT_EQ(layout.piece(0, 0), (Piece{0, 1 << 20, 0}));
  EXPECT_EQ(layout.piece(0, 1), Piece{});
  EXPECT_EQ(layout.items_of(1), (FlatLayout::Span{1, 2}));
}

TEST(FlatLayout, AParameterSmallerThanTheWorldLeavesEmptyPieces) {
  const FlatLayout layout(items({3}), 8, 1);
  EXPECT_EQ(layout.shard_numel(), 1);
  EXPECT_EQ(layout.piece(0, 2), (Piece{2, 3, 0}));
  EXPECT_EQ(layout.piece(0, 3), Piece{});
}

TEST(FlatLayout, PaddingForWholeRowsIsReported) {
  // 5 rows of 7 over 2 ranks: 3 rows and 2.
  const FlatLayout layout({{.numel = 35, .block = 7}}, 2, 1);
  EXPECT_EQ(layout.shard_numel(), 21);
  EXPECT_EQ(layout.padding(), 7);
}

TEST(FlatLayout, NothingAtAllIsALayout) {
  const FlatLayout layout({}, 4, 16);
  EXPECT_EQ(layout.total(), 0);
  EXPECT_EQ(layout.items_of(3), FlatLayout::Span{});
}

TEST(FlatLayout, RefusesBlocksThatDoNotDivideTheirParameter) {
  try {
    FlatLayout({{.numel = 10, .block = 4}}, 2, 1);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("blocks of 4; choose a divisor"));
  }
}

TEST(FlatLayout, CostsTheSameForSixteenThousandRanks) {
  constexpr int64_t kRanks = 16'384;
  std::vector<FlatItem> from;
  for (int i = 0; i < 1'000; ++i) from.push_back({.numel = 4096 * (11 + i % 7) + i, .block = 1});
  const auto begin = std::chrono::steady_clock::now();
  const FlatLayout layout(from, kRanks, 16);
  int64_t held = 0;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const auto span = layout.items_of(rank);
    for (std::size_t i = span.first; i < span.last; ++i) held += layout.piece(i, rank).numel();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(held, layout.total() - layout.padding());
  EXPECT_LT(took.count(), 0.5);  // a few milliseconds; half a second is what a walk over all pairs would need
}

TEST(PlanGroups, FusesWhatIsOfOneKind) {
  const std::vector<GroupKey> keys = {{0, 10}, {1, 10}, {0, 10}};
  EXPECT_THAT(plan_groups(keys, true, 0), ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
  EXPECT_THAT(plan_groups(keys, false, 0), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
}

TEST(PlanGroups, TheByteLimitIsARunningSum) {
  const std::vector<GroupKey> keys = {{0, 40}, {0, 40}, {0, 40}, {0, 300}, {0, 10}};
  EXPECT_THAT(plan_groups(keys, true, 100),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3), ElementsAre(4)));
}

}  // namespace
}  // namespace neap::shard
