// torch-free
#include <atomic>
#include <stdexcept>
#include <thread>

#include "neap/sim/engine/engine_fixture.h"
#include "neap/trace/recorder.h"
#include "testing/error_of.h"

namespace neap::sim {
namespace {

using ::testing::HasSubstr;

DeviceConfig on_the_real_clock() {
  DeviceConfig config = round_numbers();
  config.clock = Clock::kReal;
  return config;
}

// Links are held and released by hand, and the clock is real: what is complete is what really happened.
class EngineStreams : public EngineTest {
 protected:
  EngineStreams() : EngineTest(on_the_real_clock()) {}

  // A copy that does nothing but note its turn.
  void note(Stream* on, Link link, int turn) {
    engine.submit_copy(
        on, link, 1, {}, "copy", [this, turn] { turns.push_back(turn); }, Wait::kNo);
  }
  void hold_out() { engine.pause(0, Link::kDeviceToHost); }
  void release_out() { engine.resume(0, Link::kDeviceToHost); }

  std::vector<int> turns;
};

TEST_F(EngineStreams, AStreamRunsItsCopiesInOrder) {
  for (int i = 0; i < 20; ++i) note(out, i % 2 == 0 ? Link::kDeviceToHost : Link::kHostToDevice, i);
  engine.synchronize(out);
  EXPECT_THAT(turns, ::testing::SizeIs(20));
  EXPECT_TRUE(std::is_sorted(turns.begin(), turns.end()));
}

TEST_F(EngineStreams, ACopyReturnsBeforeItIsDone) {
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  EXPECT_FALSE(engine.query(out));
  EXPECT_TRUE(engine.query(compute)) << "other streams are not held";
  release_out();
  engine.synchronize(out);
  EXPECT_TRUE(engine.query(out));
}

TEST_F(EngineStreams, TheTwoDirectionsHaveEnginesOfTheirOwn) {
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  note(in, Link::kHostToDevice, 2);
  engine.synchronize(in);
  EXPECT_THAT(turns, ::testing::ElementsAre(2));
  release_out();
  engine.synchronize(out);
  EXPECT_THAT(turns, ::testing::ElementsAre(2, 1));
}

TEST_F(EngineStreams, AnEventIsDoneWhenWhatItRecordedIs) {
  Event event;
  EXPECT_TRUE(engine.query(event)) << "never recorded";
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  engine.record(event, out);
  EXPECT_FALSE(engine.query(event));
  note(out, Link::kHostToDevice, 2);
  release_out();
  engine.synchronize(event);
  EXPECT_TRUE(engine.query(event));
  engine.synchronize(out);
}

TEST_F(EngineStreams, AStreamThatWaitsForAnEventRunsAfterIt) {
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  order(out, in);
  note(in, Link::kHostToDevice, 2);
  EXPECT_FALSE(engine.query(in));
  release_out();
  engine.synchronize(in);
  EXPECT_THAT(turns, ::testing::ElementsAre(1, 2));
}

TEST_F(EngineStreams, RecordingAgainDoesNotReleaseWhoWaitsForTheFormerVersion) {
  Event event;
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  engine.record(event, out);
  engine.wait(in, event);
  engine.record(event, compute);  // a second version, complete at once
  EXPECT_TRUE(engine.query(event));
  note(in, Link::kHostToDevice, 2);
  EXPECT_FALSE(engine.query(in));
  release_out();
  engine.synchronize(in);
  EXPECT_THAT(turns, ::testing::ElementsAre(1, 2));
}

TEST_F(EngineStreams, RecordingAgainDoesNotHoldUpWhoWaitsForTheFormerVersion) {
  Event event;
  engine.record(event, compute);
  engine.wait(in, event);
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  engine.record(event, out);  // never complete while the link is held
  note(in, Link::kHostToDevice, 2);
  engine.synchronize(in);
  EXPECT_THAT(turns, ::testing::ElementsAre(2));
  release_out();
  engine.synchronize(out);
}

TEST_F(EngineStreams, WaitingForAnEventThatWasNeverRecordedIsNothing) {
  engine.wait(compute, Event());
  EXPECT_TRUE(engine.query(compute));
  engine.synchronize(Event());
}

TEST_F(EngineStreams, AKernelWaitsForTheCopyItsStreamWaitsFor) {
  hold_out();
  std::atomic<bool> copied{false};
  engine.submit_copy(
      out, Link::kDeviceToHost, 1, {}, "copy", [&] { copied = true; }, Wait::kNo);
  order(out, compute);
  EXPECT_FALSE(engine.query(compute));
  std::thread releaser([&] { release_out(); });
  kernel(compute, {});
  EXPECT_TRUE(copied);
  releaser.join();
  EXPECT_EQ(engine.counters(0).threads, 1) << "the compute stream waits without a worker";
}

TEST_F(EngineStreams, KernelsOfOtherStreamsOverlapWithAQueuedCopy) {
  Block* device = allocate(100);
  Block* host = allocate_pinned(100);
  fill(device, 5);
  order(compute, out);
  hold_out();
  copy(out, device, host);
  for (int i = 0; i < 10; ++i) kernel(compute, {reads(device)});
  EXPECT_FALSE(engine.query(out));
  release_out();
  engine.synchronize(out);
  EXPECT_EQ(byte_of(host), 5);
  engine.free(device);
  engine.free(host);
}

TEST_F(EngineStreams, ACopyTheHostWaitsForRunsOnItsOwnThread) {
  std::thread::id where;
  engine.submit_copy(
      out, Link::kDeviceToHost, 1, {}, "copy", [&] { where = std::this_thread::get_id(); }, Wait::kForCompletion);
  EXPECT_EQ(where, std::this_thread::get_id());
  EXPECT_EQ(engine.counters(0).threads, 0);
}

TEST_F(EngineStreams, ABlockingCopyComesAfterWhatItsStreamHasQueued) {
  note(out, Link::kDeviceToHost, 1);
  engine.submit_copy(
      out, Link::kDeviceToHost, 1, {}, "copy", [&] { turns.push_back(2); }, Wait::kForCompletion);
  EXPECT_THAT(turns, ::testing::ElementsAre(1, 2));
}

TEST_F(EngineStreams, TheFailureOfAQueuedCopyReachesWhoWaitsForIt) {
  const auto fail = [] { throw std::runtime_error("broken copy"); };
  engine.submit_copy(out, Link::kDeviceToHost, 1, {}, "copy", fail, Wait::kNo);
  EXPECT_THROW(engine.synchronize(out), std::runtime_error);
  engine.synchronize(out);  // told once
  engine.submit_copy(out, Link::kDeviceToHost, 1, {}, "copy", fail, Wait::kNo);
  EXPECT_THROW(kernel(out, {}), std::runtime_error);
  kernel(out, {});
  engine.submit_copy(out, Link::kDeviceToHost, 1, {}, "copy", fail, Wait::kNo);
  EXPECT_THROW(
      {
        while (!engine.query(out)) std::this_thread::yield();
      },
      std::runtime_error);
  EXPECT_THROW(engine.submit_copy(out, Link::kDeviceToHost, 1, {}, "copy", fail, Wait::kForCompletion),
               std::runtime_error);
  note(out, Link::kDeviceToHost, 1);
  engine.synchronize(out);
  EXPECT_THAT(turns, ::testing::ElementsAre(1));
}

TEST_F(EngineStreams, AnEventBehindAFailedCopyStillCompletes) {
  Event event;
  engine.submit_copy(
      out, Link::kDeviceToHost, 1, {}, "copy", [] { throw std::runtime_error("broken"); }, Wait::kNo);
  engine.record(event, out);
  order(out, compute);
  engine.synchronize(event);
  kernel(compute, {});
  EXPECT_THROW(engine.synchronize(out), std::runtime_error);
}

TEST_F(EngineStreams, PoolsHandOutFourStreamsEachAndNewStreamsAreOthers) {
  std::vector<int> low, high, fresh;
  for (int i = 0; i < 8; ++i) {
    low.push_back(engine.pool_stream(0, false)->id());
    high.push_back(engine.pool_stream(0, true)->id());
    fresh.push_back(engine.new_stream(0)->id());
  }
  EXPECT_THAT(low, ::testing::UnorderedElementsAre(1, 2, 3, 4, 1, 2, 3, 4));
  EXPECT_THAT(high, ::testing::ElementsAre(5, 6, 7, 8, 5, 6, 7, 8));
  EXPECT_THAT(fresh, ::testing::ElementsAre(9, 10, 11, 12, 13, 14, 15, 16));
  EXPECT_EQ(engine.stream(0, 3), engine.stream(0, 3));
}

TEST_F(EngineStreams, EachThreadHasItsOwnCurrentStreamAndDevice) {
  EXPECT_EQ(Engine::exchange_stream(0, 2), 0);
  EXPECT_EQ(engine.current_stream(0)->id(), 2);
  std::thread([&] {
    EXPECT_EQ(engine.current_stream(0)->id(), 0);
    EXPECT_EQ(Engine::current_device(), 0);
    EXPECT_EQ(Engine::exchange_device(1), 0);
  }).join();
  EXPECT_EQ(Engine::current_device(), 0);
  EXPECT_EQ(Engine::exchange_stream(0, 0), 2);
}

TEST_F(EngineStreams, ElapsedTimeNeedsTwoCompleteEvents) {
  Event begin, end, never;
  engine.record(begin, compute);
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  engine.record(end, out);
  EXPECT_THROW(engine.elapsed_ms(begin, end), UserError);
  EXPECT_THROW(engine.elapsed_ms(begin, never), UserError);
  release_out();
  engine.synchronize(end);
  EXPECT_GT(engine.elapsed_ms(begin, end), 0);
}

TEST_F(EngineStreams, AfterTheWorkersStoppedCopiesRunWhereTheyAreSubmitted) {
  hold_out();
  note(out, Link::kDeviceToHost, 1);
  engine.stop_workers();
  EXPECT_THAT(turns, ::testing::ElementsAre(1)) << "stopping releases held links and works off the queues";
  note(out, Link::kDeviceToHost, 2);
  Event event;
  engine.record(event, out);
  engine.wait(in, event);
  note(in, Link::kHostToDevice, 3);
  EXPECT_TRUE(engine.query(event));
  EXPECT_THAT(turns, ::testing::ElementsAre(1, 2, 3));
  engine.stop_workers();
}

TEST_F(EngineStreams, TheEndOfTheEngineFinishesWhatIsQueued) {
  int copies = 0;
  {
    Engine other(on_the_real_clock());
    other.pause(0, Link::kDeviceToHost);
    Event event;
    for (int i = 0; i < 10; ++i)
      other.submit_copy(
          other.stream(0, 1), Link::kDeviceToHost, 1, {}, "copy", [&] { ++copies; }, Wait::kNo);
    other.record(event, other.stream(0, 1));
    other.wait(other.stream(0, 2), event);
    other.submit_copy(
        other.stream(0, 2), Link::kHostToDevice, 1, {}, "copy", [&] { ++copies; }, Wait::kNo);
  }
  EXPECT_EQ(copies, 11);
}

TEST_F(EngineStreams, TheRecorderSeesCopiesAndMemoryOnTheRealClock) {
  trace::Recorder recorder;
  engine.set_recorder(&recorder);
  note(out, Link::kDeviceToHost, 1);
  engine.synchronize(out);
  engine.free(allocate(512));
  engine.set_recorder(nullptr);
  const auto snapshot = recorder.snapshot();
  EXPECT_THAT(snapshot.find("sim:0/copies out", "copy"), ::testing::SizeIs(1));
  EXPECT_THAT(snapshot.find("sim:0/memory", "bytes in use"), ::testing::SizeIs(2));
}

class EngineWithoutPatience : public EngineTest {
 protected:
  EngineWithoutPatience() : EngineTest(round_numbers(), std::chrono::milliseconds(1)) {}
};

TEST_F(EngineWithoutPatience, AWaitThatAPausedLinkMakesEndlessThrows) {
  engine.pause(0, Link::kDeviceToHost);
  engine.submit_copy(
      out, Link::kDeviceToHost, 1, {}, "copy", [] {}, Wait::kNo);
  Event event;
  engine.record(event, out);
  order(out, compute);
  EXPECT_THROW(engine.synchronize(event), InternalError);
  EXPECT_THROW(kernel(compute, {}), InternalError);
  EXPECT_THROW(engine.submit_copy(
                   in, Link::kDeviceToHost, 1, {}, "copy", [] {}, Wait::kForCompletion),
               InternalError);
  EXPECT_THAT(testing::error_of<InternalError>([&] { engine.synchronize(out); }),
              HasSubstr("resume the link before waiting for its copies"));
  EXPECT_FALSE(engine.query(event)) << "on the virtual clock it is time, but the copy is held";
  EXPECT_FALSE(engine.query(out));
  engine.resume(0, Link::kDeviceToHost);
  engine.synchronize(out);
}

// ---- copies of plain bytes

class EngineMoves : public EngineTest {
 protected:
  explicit EngineMoves(const DeviceConfig& config = round_numbers()) : EngineTest(config) {}

  void move(Stream* on, Block* from, Block* to) {
    const Range ranges[] = {reads(from), writes(to)};
    engine.submit_copy(on, Link::kDeviceToHost, {to->data(), from->data(), from->bytes()}, ranges, "copy out",
                       Wait::kNo);
  }
  // A filled block, page-locked memory for it, and `out` behind the filling.
  void prepare(std::size_t bytes) {
    device = allocate(bytes);
    host = allocate_pinned(bytes);
    std::memset(host->data(), 0, bytes);
    fill(device, 5, 5000);
    order(compute, out);
  }
  void TearDown() override {
    engine.synchronize(out);
    EXPECT_EQ(byte_of(host, host->bytes() - 1), 5);
    engine.free(device);
    engine.free(host);
    EngineTest::TearDown();
  }

  Block *device = nullptr, *host = nullptr;
};

TEST_F(EngineMoves, FewBytesAreThereAtOnceAndOnTheClockAsLateAsEver) {
  prepare(100);
  move(out, device, host);
  EXPECT_EQ(byte_of(host), 5);
  EXPECT_EQ(engine.counters(0).threads, 0) << "no worker was needed";
  EXPECT_FALSE(engine.query(out)) << "the clock has not come there";
  EXPECT_EQ(engine.stream_time_ns(out), 5100);

  copy(out, device, host);
  EXPECT_EQ(engine.stream_time_ns(out), 5200) << "as long as a copy that a worker makes";
  EXPECT_EQ(engine.counters(0).d2h.copies, 2);
}

TEST_F(EngineMoves, FewBytesKeepTheirPlaceBehindWhatIsQueued) {
  prepare(100);
  engine.pause(0, Link::kDeviceToHost);
  engine.submit_copy(
      out, Link::kDeviceToHost, 1, {}, "copy", [&] { std::memset(host->data(), 9, 100); }, Wait::kNo);
  move(out, device, host);
  EXPECT_EQ(byte_of(host), 0);
  engine.resume(0, Link::kDeviceToHost);  // TearDown: the later of the two has the last word
}

TEST_F(EngineMoves, FewBytesWaitForAPausedLink) {
  prepare(100);
  engine.pause(0, Link::kDeviceToHost);
  move(out, device, host);
  EXPECT_EQ(byte_of(host), 0);
  engine.resume(0, Link::kDeviceToHost);
}

TEST_F(EngineMoves, ManyBytesAreAWorkersAffair) {
  prepare(std::size_t{1} << 20);
  move(out, device, host);
  EXPECT_EQ(engine.counters(0).threads, 1);
}

class EngineMovesInRealTime : public EngineMoves {
 protected:
  EngineMovesInRealTime() : EngineMoves(on_the_real_clock()) {}
};

TEST_F(EngineMovesInRealTime, FewBytesAreQueuedAsAllOthers) {
  prepare(100);
  move(out, device, host);
  EXPECT_EQ(engine.counters(0).threads, 1);
}

}  // namespace
}  // namespace neap::sim
