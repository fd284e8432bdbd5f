// torch-free
#include "neap/train/read_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <vector>

#include "testing/error_of.h"

namespace neap::train {
namespace {

using testing::error_of;

constexpr std::chrono::seconds kPatience{30};

// Counts what the maker has begun, and lets a test wait for it and hold it.
class Gate {
 public:
  void pass() {
    const MutexLock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(mutex_, [this]() NEAP_REQUIRES(mutex_) { return open_; });
  }
  bool wait_for_arrivals(int count) {
    const MutexLock lock(mutex_);
    return changed_.wait_for(mutex_, kPatience, [&]() NEAP_REQUIRES(mutex_) { return arrived_ >= count; });
  }
  void open() {
    const MutexLock lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  int arrived() {
    const MutexLock lock(mutex_);
    return arrived_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int arrived_ NEAP_GUARDED_BY(mutex_) = 0;
  bool open_ NEAP_GUARDED_BY(mutex_) = false;
};

TEST(ReadAhead, GivesItemsInOrderFromTheFirst) {
  ReadAhead<int64_t> ahead([](int64_t i) { return i * i; }, 3, 2);
  for (const int64_t expected : {9, 16, 25, 36}) EXPECT_EQ(ahead.next(), expected);
}

TEST(ReadAhead, ItemsAreMadeBeforeTheyAreAskedForAndNoMoreThanTheDepth) {
  Gate gate;
  gate.open();
  ReadAhead<int64_t> ahead(
      [&](int64_t i) {
        gate.pass();
        return i;
      },
      0, 3);
  ASSERT_TRUE(gate.wait_for_arrivals(3));
  // The first three fill the room, so a fourth can begin only after next() has made some.
  EXPECT_EQ(gate.arrived(), 3);
  EXPECT_EQ(ahead.next(), 0);
  ASSERT_TRUE(gate.wait_for_arrivals(4));
  EXPECT_EQ(ahead.next(), 1);
}

TEST(ReadAhead, WhatTheMakerThrowsComesInItsTurnAndStays) {
  ReadAhead<int64_t> ahead(
      [](int64_t i) {
        if (i == 2) throw std::runtime_error("the disk is gone");
        return i;
      },
      0, 4);
  EXPECT_EQ(ahead.next(), 0);
  EXPECT_EQ(ahead.next(), 1);
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(error_of<std::runtime_error>([&] { ahead.next(); }), "the disk is gone");
  }
}

TEST(ReadAhead, EndsWhileTheMakerIsWaitingForRoomOrAtWork) {
  {
    Gate gate;
    gate.open();
    const ReadAhead<int64_t> full(
        [&](int64_t i) {
          gate.pass();
          return i;
        },
        0, 1);
    ASSERT_TRUE(gate.wait_for_arrivals(1));
  }
  Gate gate;
  auto busy = std::make_unique<ReadAhead<int64_t>>(
      [&](int64_t i) {
        gate.pass();
        return i;
      },
      0, 5);
  ASSERT_TRUE(gate.wait_for_arrivals(1));
  std::thread opener([&] { gate.open(); });
  busy.reset();  // waits for the item at work
  opener.join();
  EXPECT_GE(gate.arrived(), 1);
}

TEST(ReadAhead, CountsTheTimeThatWasWaited) {
  Gate gate;
  ReadAhead<int64_t> ahead(
      [&](int64_t i) {
        gate.pass();
        return i;
      },
      0, 1);
  EXPECT_EQ(ahead.waited().count(), 0);
  ASSERT_TRUE(gate.wait_for_arrivals(1));
  std::thread opener([&] { gate.open(); });
  EXPECT_EQ(ahead.next(), 0);
  opener.join();
  EXPECT_GT(ahead.waited().count(), 0);
}

TEST(ReadAhead, ItemsMayBeMovableOnly) {
  ReadAhead<std::unique_ptr<int64_t>> ahead([](int64_t i) { return std::make_unique<int64_t>(i); }, 0, 2);
  for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(*ahead.next(), i);
}

}  // namespace
}  // namespace neap::train
