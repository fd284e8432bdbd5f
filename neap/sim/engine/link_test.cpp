// torch-free
#include "neap/sim/engine/link.h"

#include <gtest/gtest.h>

#include <thread>

namespace neap::sim {
namespace {

TEST(LinkSchedule, CarriesOneCopyAtATime) {
  LinkSchedule link;
  EXPECT_EQ(link.reserve(0, 100), 0);
  EXPECT_EQ(link.reserve(0, 100), 100);
  EXPECT_EQ(link.reserve(150, 100), 200);
  EXPECT_EQ(link.reserve(1000, 100), 1000);
}

TEST(LinkSchedule, ALaterCopyThatIsReadyGoesBeforeOneThatStillWaits) {
  LinkSchedule link;
  EXPECT_EQ(link.reserve(1000, 100), 1000);
  EXPECT_EQ(link.reserve(0, 600), 0);
  EXPECT_EQ(link.reserve(0, 400), 600) << "the rest of the gap";
  EXPECT_EQ(link.reserve(0, 1), 1100);
}

TEST(LinkSchedule, ACopyThatFitsNoGapDelaysNobody) {
  LinkSchedule link;
  EXPECT_EQ(link.reserve(100, 100), 100);
  EXPECT_EQ(link.reserve(0, 101), 200);
  EXPECT_EQ(link.reserve(0, 100), 0);
}

TEST(LinkSchedule, ForgetsTheOldestGaps) {
  LinkSchedule link;
  for (int i = 1; i <= 20; ++i) EXPECT_EQ(link.reserve(i * 100, 10), i * 100);
  EXPECT_EQ(link.reserve(0, 50), 1210) << "eight gaps are kept: those before 1300 to 2000";
}

TEST(LinkGate, GivesUpOnAPausedLinkWithoutRunningTheCopy) {
  LinkGate gate;
  gate.pause();
  bool ran = false;
  EXPECT_FALSE(gate.pass([&] { ran = true; }, std::chrono::nanoseconds(0), std::chrono::microseconds(1)));
  EXPECT_FALSE(ran);
  gate.resume();
  EXPECT_TRUE(gate.pass([&] { ran = true; }, std::chrono::nanoseconds(0), std::chrono::microseconds(1)));
  EXPECT_TRUE(ran);
}

TEST(LinkGate, HoldsACopyUntilItIsResumed) {
  LinkGate gate;
  gate.pause();
  std::atomic<bool> ran{false};
  std::thread copier([&] { gate.pass([&] { ran = true; }, std::chrono::nanoseconds(0), std::chrono::nanoseconds(0)); });
  EXPECT_FALSE(ran);
  gate.resume();
  copier.join();
  EXPECT_TRUE(ran);
}

TEST(LinkGate, ATimedCopyTakesItsTimeAndExcludesOthers) {
  LinkGate gate;
  const auto begin = std::chrono::steady_clock::now();
  const auto each = std::chrono::milliseconds(5);
  std::thread other([&] { gate.pass([] {}, each, std::chrono::nanoseconds(0)); });
  gate.pass([] {}, each, std::chrono::nanoseconds(0));
  other.join();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 2 * each);
}

TEST(LinkGate, OpensAgainAfterACopyThatThrew) {
  LinkGate gate;
  const auto fail = [] { throw std::runtime_error("broken"); };
  EXPECT_THROW(gate.pass(fail, std::chrono::milliseconds(1), std::chrono::nanoseconds(0)), std::runtime_error);
  bool ran = false;
  EXPECT_TRUE(gate.pass([&] { ran = true; }, std::chrono::nanoseconds(1), std::chrono::nanoseconds(0)));
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace neap::sim
