// torch-free
#include "neap/comm/internal/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>
#include <vector>

namespace neap::comm::internal {
namespace {

using namespace std::chrono_literals;

TEST(Watchdog, CallsWhenTheTimeIsUp) {
  Watchdog dog;
  std::promise<Watchdog::Clock::time_point> called;
  const auto begin = Watchdog::Clock::now();
  const auto watch = dog.watch(5ms, [&] { called.set_value(Watchdog::Clock::now()); });
  EXPECT_GE(called.get_future().get() - begin, 5ms);
}

TEST(Watchdog, AnEarlierDeadlineIsMetThoughALaterOneWasKnownFirst) {
  Watchdog dog;
  std::atomic<bool> late = false;
  std::promise<void> early;
  const auto slow = dog.watch(1h, [&] { late = true; });
  const auto fast = dog.watch(1ms, [&] { early.set_value(); });
  early.get_future().wait();
  EXPECT_FALSE(late);
}

TEST(Watchdog, DoesNotCallForWhatIsOver) {
  Watchdog dog;
  std::atomic<int> calls = 0;
  for (int i = 0; i < 1000; ++i) const auto watch = dog.watch(1h, [&] { ++calls; });
  std::promise<void> last;
  const auto watch = dog.watch(1ms, [&] { last.set_value(); });
  last.get_future().wait();
  EXPECT_EQ(calls, 0);
}

// The function has either ended or will never begin when the watch is gone: what it captures may go too.
TEST(Watchdog, AWatchThatGoesWaitsForItsFunction) {
  Watchdog dog;
  for (int i = 0; i < 200; ++i) {
    auto alive = std::make_unique<std::atomic<int>>(0);
    {
      const auto watch = dog.watch(std::chrono::microseconds(i), [&alive] { ++*alive; });
      if (i % 2 == 0) std::this_thread::yield();
    }
    alive.reset();
  }
}

TEST(Watchdog, ManyThreadsWatchAtOnce) {
  Watchdog dog;
  std::atomic<int> expired = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        const auto over = dog.watch(1h, [&] { expired = -1'000'000; });
        std::promise<void> called;
        const auto due = dog.watch(1us, [&] { ++expired, called.set_value(); });
        called.get_future().wait();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(expired, 400);
}

}  // namespace
}  // namespace neap::comm::internal
