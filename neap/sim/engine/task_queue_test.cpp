// torch-free
#include "neap/sim/engine/task_queue.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "testing/error_of.h"

namespace neap::sim {
namespace {

constexpr auto kLong = std::chrono::seconds(60);

std::shared_ptr<Recording> recording() { return std::make_shared<Recording>(0, 0, VectorClock()); }

TEST(TaskQueue, RunsTasksInTheirOrder) {
  TaskQueue queue;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) queue.push({.work = [&order, i] { order.push_back(i); }});
  ASSERT_TRUE(queue.wait_idle(kLong));
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST(TaskQueue, StartsOneThreadWhenItIsFirstNeeded) {
  TaskQueue queue;
  EXPECT_TRUE(queue.idle());
  EXPECT_TRUE(queue.push({.work = [] {}}));
  EXPECT_FALSE(queue.push({.work = [] {}}));
}

TEST(TaskQueue, WaitsForARecordingOfAnotherQueue) {
  TaskQueue queue;
  auto gate = recording(), after = recording();
  queue.push({.wait_for = gate});
  queue.push({.record = after});
  EXPECT_FALSE(queue.wait_idle(std::chrono::nanoseconds(1)));
  EXPECT_FALSE(after->done());
  gate->finish();
  EXPECT_TRUE(after->wait_for(kLong));
  EXPECT_TRUE(queue.wait_idle(kLong));
}

TEST(TaskQueue, IsIdleAsSoonAsItsLastEventIsSeenDone) {
  for (int round = 0; round < 200; ++round) {
    TaskQueue queue;
    auto event = recording();
    queue.push({.record = event});
    event->wait();
    ASSERT_TRUE(queue.idle());
  }
}

TEST(TaskQueue, TellsTheFirstFailureOnceAndGoesOn) {
  TaskQueue queue;
  bool later = false;
  queue.push({.work = [] { throw std::runtime_error("first"); }});
  queue.push({.work = [] { throw std::runtime_error("second"); }});
  queue.push({.work = [&] { later = true; }});
  ASSERT_TRUE(queue.wait_idle(kLong));
  EXPECT_TRUE(later);
  EXPECT_FALSE(queue.idle()) << "a failure waits to be told";
  EXPECT_EQ(testing::error_of<std::runtime_error>([&] { queue.rethrow_failure(); }), "first");
  queue.rethrow_failure();
  EXPECT_TRUE(queue.idle());
}

TEST(TaskQueue, StopWorksOffWhatIsQueued) {
  int done = 0;
  TaskQueue queue;
  for (int i = 0; i < 50; ++i) queue.push({.work = [&] { ++done; }});
  queue.stop();
  EXPECT_EQ(done, 50);
}

}  // namespace
}  // namespace neap::sim
