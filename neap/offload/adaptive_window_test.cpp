// torch-free
#include "neap/offload/adaptive_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace neap::offload {
namespace {

using namespace neap::literals;

WaitSummary waits(const std::vector<int64_t>& each_ns, int64_t span_ns, Bytes each = 1_MiB) {
  WaitSummary summary;
  for (const int64_t ns : each_ns) summary.add(ns, each);
  summary.span_ns = span_ns;
  return summary;
}

TEST(AdaptiveWindow, ALateReloadWidensAtOnce) {
  AdaptiveWindow window(8_MiB, 100_MiB);
  window.widen();
  EXPECT_EQ(window.size(), 16_MiB);
  for (int i = 0; i < 10; ++i) window.widen();
  EXPECT_EQ(window.size(), 100_MiB);
}

TEST(AdaptiveWindow, AStallWidensByWhatTheLinkMovesMeanwhile) {
  AdaptiveWindow window(8_MiB, 100_MiB);
  window.learn(waits({-50, 1 << 20, -70}, 100 << 20), 1.0);
  EXPECT_GE(window.size(), 9_MiB);
  EXPECT_LE(window.size(), 10_MiB);
}

TEST(AdaptiveWindow, AnIdleWindowNarrowsButNotBelowItsFloor) {
  AdaptiveWindow window(8_MiB, 100_MiB);
  window.learn(waits({-(4 << 20), -(6 << 20)}, 100 << 20), 1.0);
  EXPECT_EQ(window.size(), 6_MiB);
  for (int i = 0; i < 50; ++i) window.learn(waits({-(4 << 20)}, 100 << 20), 1.0);
  EXPECT_EQ(window.size(), 64_KiB);
}

TEST(AdaptiveWindow, DoesNotTryAgainWhatWasTooNarrow) {
  // Storages of one MiB: a window is as good as the whole storages in it. Three of them are needed.
  AdaptiveWindow window(64_MiB, 100_MiB);
  int stalls = 0;
  for (int pass = 0; pass < 100; ++pass) {
    const int64_t storages = window.size().count >> 20;
    const int64_t wait_ns = (3 - storages) * (1 << 20);
    stalls += wait_ns > 0;
    window.learn(waits(std::vector<int64_t>(32, wait_ns), int64_t{200} << 20), 1.0);
  }
  EXPECT_LE(stalls, 3);
  EXPECT_GE(window.size(), 3_MiB);
  EXPECT_LE(window.size(), 5_MiB);
}

TEST(AdaptiveWindow, ASaturatedLinkIsNotHelpedByMemory) {
  AdaptiveWindow window(8_MiB, 100_MiB);
  // 10 MiB moved at 1 ns a byte within a span of 10 Mi ns: the link never rested.
  window.learn(waits(std::vector<int64_t>(10, 1 << 20), 10 << 20), 1.0);
  EXPECT_EQ(window.size(), 8_MiB);
}

TEST(AdaptiveWindow, TinyStallsAndMissingMeasurementsChangeNothing) {
  AdaptiveWindow window(8_MiB, 100_MiB);
  window.learn(waits({10, -5}, 1 << 30), 1.0);
  window.learn(waits({}, 0), 1.0);
  window.learn(waits({1 << 20}, 100 << 20), std::nullopt);
  EXPECT_EQ(window.size(), 8_MiB);
}

TEST(AdaptiveWindow, ALimitOfZeroIsZero) {
  AdaptiveWindow window(8_MiB, 0_B);
  window.widen();
  EXPECT_EQ(window.size(), 0_B);
}

// A link of 1 ns a byte behind compute that asks for one MiB every 1.5 Mi ns: a copy begun `window` bytes ahead has
// that many bytes' time of compute to arrive, and needs the time of one MiB. The loop must settle where nothing waits
// any more, and not far above.
TEST(AdaptiveWindow, SettlesAtTheSmallestWindowWithoutStalls) {
  for (const Bytes start : {256_KiB, 64_MiB}) {
    AdaptiveWindow window(start, 256_MiB);
    int64_t last_wait = 0;
    for (int pass = 0; pass < 40; ++pass) {
      const auto lead_ns = static_cast<int64_t>(1.5 * static_cast<double>(window.size().count));
      last_wait = (1 << 20) - lead_ns;
      window.learn(waits(std::vector<int64_t>(64, last_wait), 64 * (3 << 19)), 1.0);
    }
    EXPECT_LE(last_wait, 0);
    EXPECT_LE(window.size(), 1_MiB);
  }
}

}  // namespace
}  // namespace neap::offload
