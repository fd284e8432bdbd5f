// torch-free
#include "neap/trace/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace neap::trace {
namespace {

using namespace neap::literals;
using ::testing::ElementsAre;
using ::testing::SizeIs;

TEST(Recorder, KeepsEventsInTheOrderOfTheCallsWithTheirDetails) {
  Recorder recorder;
  recorder.span("device 0/compute", "matmul", 10, 25, {{"bytes", 4_KiB}, {"layer", "model.layers.3"}, {"share", 0.5}});
  recorder.instant("host/offload", "late", 30, {{"tensors", 2u}});
  recorder.counter("device 0/memory", "allocated", 40, 1536);

  const Snapshot seen = recorder.snapshot();
  ASSERT_THAT(seen.events, SizeIs(3));
  EXPECT_EQ(seen.events[0].kind, Kind::kSpan);
  EXPECT_EQ(seen.events[0].track, "device 0/compute");
  EXPECT_EQ(seen.events[0].begin_ns, 10);
  EXPECT_EQ(seen.events[0].end_ns, 25);
  const std::vector<Arg> args = seen.args_of(seen.events[0]);
  ASSERT_THAT(args, SizeIs(3));
  EXPECT_EQ(std::get<int64_t>(args[0].value), 4096);
  EXPECT_EQ(std::get<std::string_view>(args[1].value), "model.layers.3");
  EXPECT_EQ(std::get<double>(args[2].value), 0.5);
  EXPECT_EQ(seen.events[1].kind, Kind::kInstant);
  EXPECT_EQ(std::get<int64_t>(seen.args_of(seen.events[1])[0].value), 2);
  EXPECT_EQ(seen.events[2].kind, Kind::kCounter);
  EXPECT_EQ(seen.events[2].value, 1536);
  EXPECT_THAT(seen.args_of(seen.events[2]), SizeIs(0));
}

TEST(Recorder, CopiesNamesSoThatCallersMayReuseTheirBuffers) {
  Recorder recorder;
  std::string name = "first";
  recorder.instant("t", name, 1, {{"key", name}});
  name = "other";
  const Snapshot seen = recorder.snapshot();
  EXPECT_EQ(seen.events[0].name, "first");
  EXPECT_EQ(std::get<std::string_view>(seen.args[0].value), "first");
}

TEST(Recorder, FindsTheEventsOfOneTrackAndName) {
  Recorder recorder;
  recorder.span("a", "copy", 1, 2);
  recorder.span("b", "copy", 3, 4);
  recorder.span("a", "wait", 5, 6);
  recorder.span("a", "copy", 7, 8);
  std::vector<int64_t> begins;
  for (const Event& event : recorder.snapshot().find("a", "copy")) begins.push_back(event.begin_ns);
  EXPECT_THAT(begins, ElementsAre(1, 7));
}

TEST(Recorder, ASpanThatEndsBeforeItBeginsHasLengthZero) {
  Recorder recorder;
  recorder.span("t", "n", 10, 7);
  EXPECT_EQ(recorder.snapshot().events[0].end_ns, 10);
}

TEST(Recorder, DropsTheNewestBeyondItsLimitAndCountsThem) {
  Recorder recorder({.limit = 4_KiB});
  for (int i = 0; i < 1000; ++i) recorder.span("t", "n", i, i + 1, {{"i", i}});
  const Snapshot seen = recorder.snapshot();
  EXPECT_GT(seen.events.size(), 10u);
  EXPECT_EQ(static_cast<int64_t>(seen.events.size()) + seen.dropped, 1000);
  EXPECT_EQ(seen.events.back().begin_ns,
            static_cast<int64_t>(seen.events.size()) - 1);  // the first ones, without a gap
  EXPECT_LE(recorder.used(), 4_KiB);
}

TEST(Recorder, EndlesslyManyNamesStayWithinTheLimitToo) {
  Recorder recorder({.limit = 8_KiB});
  for (int i = 0; i < 1000; ++i) recorder.instant("t", "name " + std::to_string(i), i, {{"k", std::to_string(i)}});
  EXPECT_LE(recorder.used(), 8_KiB);
  const Snapshot seen = recorder.snapshot();
  EXPECT_GT(seen.dropped, 0);
  EXPECT_EQ(seen.args.size(), seen.events.size());  // a dropped event leaves no arguments behind
}

TEST(Recorder, AnUnrepresentableCounterIsDropped) {
  Recorder recorder;
  recorder.counter("t", "s", 1, std::numeric_limits<double>::quiet_NaN());
  recorder.counter("t", "s", 2, std::numeric_limits<double>::infinity());
  EXPECT_EQ(recorder.dropped(), 2);
  EXPECT_THAT(recorder.snapshot().events, SizeIs(0));
}

TEST(Recorder, ClearForgetsEventsAndKeepsEarlierSnapshotsReadable) {
  Recorder recorder({.limit = 4_KiB});
  for (int i = 0; i < 1000; ++i) recorder.instant("track", "name", i);
  const Snapshot before = recorder.snapshot();
  recorder.clear();
  EXPECT_EQ(recorder.dropped(), 0);
  EXPECT_THAT(recorder.snapshot().events, SizeIs(0));
  EXPECT_EQ(before.events.back().name, "name");
  recorder.instant("track", "name", 1);
  EXPECT_THAT(recorder.snapshot().events, SizeIs(1));
}

TEST(Recorder, LosesNothingWhenManyThreadsRecordAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  Recorder recorder;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&recorder, t] {
      const std::string track = "thread " + std::to_string(t);
      for (int i = 0; i < kEach; ++i) recorder.span(track, "work " + std::to_string(i % 7), i, i + 1, {{"t", t}});
    });
  for (int i = 0; i < 20; ++i) EXPECT_LE(recorder.snapshot().events.size(), size_t{kThreads * kEach});
  for (std::thread& thread : threads) thread.join();

  const Snapshot seen = recorder.snapshot();
  ASSERT_THAT(seen.events, SizeIs(kThreads * kEach));
  std::vector<int64_t> next(kThreads, 0);
  for (const Event& event :
       seen.events) {  // within a thread the order of the calls holds, and details stay with their event
    const auto t = static_cast<size_t>(std::get<int64_t>(seen.args_of(event)[0].value));
    EXPECT_EQ(event.track, "thread " + std::to_string(t));
    EXPECT_EQ(event.begin_ns, next[t]++);
  }
}

}  // namespace
}  // namespace neap::trace
