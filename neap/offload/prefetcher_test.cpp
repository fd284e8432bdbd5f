// torch-free
#include "neap/offload/prefetcher.h"

#include <gtest/gtest.h>

#include <vector>

namespace neap::offload {
namespace {

using namespace neap::literals;

// A tape whose positions are all of one size, two in a run; plays backward against the prefetcher.
class Player {
 public:
  explicit Player(int64_t positions) : state_(static_cast<size_t>(positions)) {}

  // What is fetched because `position` was unpacked, in order.
  std::vector<int64_t> unpack(int64_t position, const Prefetcher::Reach& reach) {
    std::vector<int64_t> fetched;
    if (prefetcher_.arrive(position)) state_.assign(state_.size(), kAway);
    State& here = at(position);
    if (here == kAway) ++late_;
    if (here == kAhead) prefetcher_.take_ahead(10_B);
    here = kUsed;
    prefetcher_.walk(
        reach, [](int64_t p) { return p / 2; },
        [&](int64_t p) {
          ++visits_;
          if (p == blocked_) return Prefetcher::Visit::kStop;
          if (at(p) == kAway) {
            at(p) = kAhead;
            prefetcher_.add_ahead(10_B);
            fetched.push_back(p);
          }
          return Prefetcher::Visit::kGoOn;
        });
    return fetched;
  }
  int64_t late() const { return late_; }
  int64_t visits() const { return visits_; }
  void block(int64_t position) { blocked_ = position; }

 private:
  enum State { kAway, kAhead, kUsed };
  State& at(int64_t position) { return state_[static_cast<size_t>(position)]; }

  Prefetcher prefetcher_;
  std::vector<State> state_;
  int64_t late_ = 0, visits_ = 0, blocked_ = -1;
};

using Positions = std::vector<int64_t>;

TEST(Prefetcher, KeepsTheAskedBytesAhead) {
  Player player(6);
  EXPECT_EQ(player.unpack(5, {.bytes = 20_B}), (Positions{4, 3}));
  EXPECT_EQ(player.unpack(4, {.bytes = 20_B}), (Positions{2}));
  EXPECT_EQ(player.unpack(3, {.bytes = 20_B}), (Positions{1}));
  EXPECT_EQ(player.late(), 1);
}

TEST(Prefetcher, ZeroBytesFetchesNothingAndOneByteAlwaysOne) {
  Player none(4), one(4);
  EXPECT_EQ(none.unpack(3, {.bytes = 0_B}), Positions{});
  EXPECT_EQ(one.unpack(3, {.bytes = 1_B}), Positions{2});
}

TEST(Prefetcher, ReachesToTheFirstRunAsked) {
  Player player(8);
  EXPECT_EQ(player.unpack(7, {.first_run = 2}), (Positions{6, 5, 4}));
  EXPECT_EQ(player.unpack(6, {.first_run = 2}), Positions{});
  EXPECT_EQ(player.unpack(5, {.first_run = 1}), (Positions{3, 2}));
}

TEST(Prefetcher, GoesOnFromWhereBackwardJumpedTo) {
  Player player(8);
  EXPECT_EQ(player.unpack(7, {.bytes = 10_B}), Positions{6});
  EXPECT_EQ(player.unpack(3, {.bytes = 20_B}), Positions{2});  // 6 still lies ahead, unused
  EXPECT_EQ(player.unpack(6, {.bytes = 20_B}), Positions{1});
  EXPECT_EQ(player.unpack(5, {.bytes = 20_B}), Positions{});  // was jumped over: late, and no reason to fetch more
  EXPECT_EQ(player.late(), 3);
}

TEST(Prefetcher, AscendingUnpacksWithinANodeAreNoNewSweep) {
  Player player(6);
  player.unpack(4, {.bytes = 20_B});
  player.unpack(5, {.bytes = 20_B});
  EXPECT_EQ(player.unpack(2, {.bytes = 20_B}), Positions{1});
  EXPECT_EQ(player.unpack(3, {.bytes = 20_B}), Positions{0});
  EXPECT_EQ(player.late(), 2);  // the first of all, and 5, which was passed over
}

TEST(Prefetcher, ASecondBackwardSweepsAgain) {
  Player player(4);
  for (int64_t p = 3; p >= 0; --p) player.unpack(p, {.bytes = 20_B});
  EXPECT_EQ(player.unpack(3, {.bytes = 20_B}), (Positions{2, 1}));
}

TEST(Prefetcher, WhatCannotBeFetchedNowIsTriedAgain) {
  Player player(4);
  player.block(2);
  EXPECT_EQ(player.unpack(3, {.bytes = 20_B}), Positions{});
  player.block(-1);
  EXPECT_EQ(player.unpack(3, {.bytes = 20_B}), (Positions{2, 1}));
}

TEST(Prefetcher, VisitsEachPositionOnceASweep) {
  for (const int64_t n : {1000, 100'000}) {
    Player player(n);
    for (int64_t p = n - 1; p >= 0; --p) player.unpack(p, {.bytes = 100_B});
    EXPECT_EQ(player.visits(), n - 1);
    EXPECT_EQ(player.late(), 1);
  }
}

}  // namespace
}  // namespace neap::offload
