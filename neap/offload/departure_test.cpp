// torch-free
#include "neap/offload/departure.h"

#include <gtest/gtest.h>

#include <vector>

#include "neap/offload/storage_queue.h"

namespace neap::offload {
namespace {

using namespace neap::literals;

struct QueueItem {
  explicit QueueItem(int64_t bytes) : bytes(bytes) {}
  Bytes size() const { return Bytes(bytes); }
  int64_t bytes;
  int64_t run = 0;
  QueueLink<QueueItem> link;
};
using Queue = StorageQueue<QueueItem, &QueueItem::link>;

std::vector<int64_t> drain(Queue& queue) {
  std::vector<int64_t> order;
  while (QueueItem* item = queue.front()) {
    order.push_back(item->bytes);
    queue.remove(*item);
  }
  return order;
}

TEST(StorageQueue, IsFirstInFirstOutAndCountsBytes) {
  QueueItem a(1), b(2), c(4);
  Queue queue;
  for (QueueItem* item : {&a, &b, &c}) queue.push(*item);
  EXPECT_EQ(queue.bytes(), 7_B);
  EXPECT_EQ(drain(queue), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(queue.bytes(), 0_B);
}

TEST(StorageQueue, MembersLeaveFromAnyPlace) {
  QueueItem a(1), b(2), c(4), d(8);
  Queue queue;
  for (QueueItem* item : {&a, &b, &c, &d}) queue.push(*item);
  queue.remove(b);
  queue.remove(a);
  queue.remove(d);
  queue.remove(d);  // not there any more: nothing happens
  EXPECT_EQ(queue.bytes(), 4_B);
  queue.push(a);
  EXPECT_EQ(drain(queue), (std::vector<int64_t>{4, 1}));
  EXPECT_FALSE(Queue::contains(a));
}

TEST(StorageQueue, JoiningTwiceIsABug) {
  QueueItem a(1);
  Queue queue;
  queue.push(a);
  EXPECT_THROW(queue.push(a), InternalError);
}

// Runs a pass of `units` units with one storage of 10 bytes each, and tells which of them are still there at its end.
std::vector<int64_t> tail_of(const Departure& departure, int64_t units, std::vector<int64_t>* at_once = nullptr) {
  std::vector<QueueItem> items;
  for (int64_t i = 0; i < units; ++i) items.emplace_back(10);
  Queue waiting;
  const auto settle = [&](int64_t run) {
    while (QueueItem* oldest = waiting.front()) {
      if (!departure.must_leave(run - oldest->run, waiting.bytes())) break;
      waiting.remove(*oldest);
    }
  };
  for (int64_t run = 0; run < units; ++run) {
    settle(run);
    QueueItem& item = items[static_cast<size_t>(run)];
    item.run = run;
    if (departure.leaves_at_once(run, Bytes(10 * run), 10_B)) {
      if (at_once != nullptr) at_once->push_back(run);
    } else {
      waiting.push(item);
    }
    settle(run);
  }
  std::vector<int64_t> stayed;
  while (QueueItem* item = waiting.front()) {
    stayed.push_back(item->run);
    waiting.remove(*item);
  }
  return stayed;
}

using Runs = std::vector<int64_t>;

TEST(Departure, TheFirstPassKeepsTheLastUnitWithoutKnowingWhichItIs) {
  for (const int64_t units : {1, 2, 7}) EXPECT_EQ(tail_of(Departure({.keep_runs = 1}, {}), units), Runs{units - 1});
}

TEST(Departure, AKnownPassSendsEverythingButItsTailAtOnce) {
  Runs at_once;
  EXPECT_EQ(tail_of(Departure({.keep_runs = 2}, PassShape{5, 50_B}), 5, &at_once), (Runs{3, 4}));
  EXPECT_EQ(at_once, (Runs{0, 1, 2}));
}

TEST(Departure, APassThatTurnsOutLongerStillKeepsItsOwnTail) {
  EXPECT_EQ(tail_of(Departure({.keep_runs = 1}, PassShape{3, 30_B}), 6), Runs{5});
}

TEST(Departure, APassThatTurnsOutShorterLosesOnlyItsTail) {
  EXPECT_EQ(tail_of(Departure({.keep_runs = 1}, PassShape{6, 60_B}), 3), Runs{});
}

TEST(Departure, ABudgetKeepsTheLastBytes) {
  EXPECT_EQ(tail_of(Departure({.keep_bytes = 25_B}, {}), 5), (Runs{3, 4}));
  EXPECT_EQ(tail_of(Departure({.keep_bytes = 25_B}, PassShape{5, 50_B}), 5), (Runs{3, 4}));
  EXPECT_EQ(tail_of(Departure({.keep_bytes = 1_GiB}, {}), 3), (Runs{0, 1, 2}));
}

TEST(Departure, TheLargerOfBothTailsStays) {
  EXPECT_EQ(tail_of(Departure({.keep_runs = 1, .keep_bytes = 30_B}, {}), 5), (Runs{2, 3, 4}));
  EXPECT_EQ(tail_of(Departure({.keep_runs = 3, .keep_bytes = 10_B}, {}), 5), (Runs{2, 3, 4}));
}

TEST(Departure, ZeroKeepsNothing) {
  Runs at_once;
  EXPECT_EQ(tail_of(Departure({}, {}), 3, &at_once), Runs{});
  EXPECT_EQ(at_once, (Runs{0, 1, 2}));
}

}  // namespace
}  // namespace neap::offload
