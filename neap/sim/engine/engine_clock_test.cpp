// torch-free
#include <thread>

#include "neap/sim/engine/engine_fixture.h"
#include "neap/trace/recorder.h"

namespace neap::sim {
namespace {

using EngineClock = EngineTest;  // round numbers: a kernel or copy of n bytes takes n nanoseconds

TEST_F(EngineClock, KernelsOfAStreamAddUp) {
  kernel(compute, {}, 100);
  kernel(compute, {}, 50);
  EXPECT_EQ(engine.stream_time_ns(compute), 150);
  EXPECT_EQ(engine.host_time_ns(0), 0) << "the host did not wait";
  engine.synchronize(compute);
  EXPECT_EQ(engine.host_time_ns(0), 150);
  EXPECT_EQ(engine.counters(0).host_wait_ns, 150);
  EXPECT_EQ(engine.counters(0).kernel_busy_ns, 150);
}

TEST_F(EngineClock, AKernelCostsWhatItsTighterBoundSays) {
  DeviceConfig config = engine.config();
  config.gflops = 10;
  config.hbm_gbps = 2;
  config.kernel_min_ns = 7;
  engine.configure(config);
  const auto cost = [&](KernelCost of) {
    const int64_t before = engine.stream_time_ns(compute);
    engine.begin_kernel(compute, {}, "kernel", of);
    return engine.stream_time_ns(compute) - before;
  };
  EXPECT_EQ(cost({.flops = 1000, .bytes = 20}), 100);
  EXPECT_EQ(cost({.flops = 100, .bytes = 2000}), 1000);
  EXPECT_EQ(cost({.flops = 1, .bytes = 1}), 7);
}

TEST_F(EngineClock, ACopyCostsLatencyAndBytesOverRate) {
  DeviceConfig config = engine.config();
  config.latency_ns = 30;
  config.d2h_gbps = 2;
  config.h2d_gbps = 0;
  engine.configure(config);
  engine.submit_copy(
      out, Link::kDeviceToHost, 1000, {}, "copy", [] {}, Wait::kNo);
  EXPECT_EQ(engine.stream_time_ns(out), 530);
  engine.submit_copy(
      in, Link::kHostToDevice, 1000, {}, "copy", [] {}, Wait::kNo);
  EXPECT_EQ(engine.stream_time_ns(in), 30 + 1000 / 25) << "not limited: the default link's rate";
  const Counters counters = engine.counters(0);
  EXPECT_EQ(counters.d2h, (LinkCounters{.copies = 1, .bytes = 1000, .busy_ns = 530}));
  EXPECT_EQ(counters.h2d, (LinkCounters{.copies = 1, .bytes = 1000, .busy_ns = 70}));
}

TEST_F(EngineClock, AHostThatSubmitsSlowlyBoundsTheStream) {
  DeviceConfig config = engine.config();
  config.launch_ns = 200;
  engine.configure(config);
  for (int i = 0; i < 3; ++i) kernel(compute, {}, 50);
  EXPECT_EQ(engine.stream_time_ns(compute), 650);
  EXPECT_EQ(engine.counters(0).launch_bound_ns, 200 + 150 + 150);
  EXPECT_EQ(engine.counters(0).stall_ns, 0);
}

TEST_F(EngineClock, EventsCostTheHostWhatIsSaidForThem) {
  DeviceConfig config = engine.config();
  config.launch_ns = 100;
  config.event_ns = 10;
  engine.configure(config);
  order(compute, out);
  EXPECT_EQ(engine.host_time_ns(0), 20);
  engine.advance_host(0, 5);
  EXPECT_EQ(engine.host_time_ns(0), 25);
}

TEST_F(EngineClock, ACopyOnAnotherStreamOverlapsWithKernels) {
  kernel(compute, {}, 100);
  order(compute, out);
  engine.submit_copy(
      out, Link::kDeviceToHost, 300, {}, "copy", [] {}, Wait::kNo);
  kernel(compute, {}, 500);
  EXPECT_EQ(engine.stream_time_ns(out), 400);
  EXPECT_EQ(engine.stream_time_ns(compute), 600);
  engine.synchronize_device(0);
  EXPECT_EQ(engine.host_time_ns(0), 600) << "not 900";
}

TEST_F(EngineClock, WaitingForAnEventTakesTheLaterTime) {
  engine.submit_copy(
      in, Link::kHostToDevice, 300, {}, "copy", [] {}, Wait::kNo);
  kernel(compute, {}, 100);
  order(in, compute);
  EXPECT_EQ(engine.counters(0).stall_ns, 0) << "nothing was held up yet";
  kernel(compute, {}, 100);
  EXPECT_EQ(engine.stream_time_ns(compute), 400);
  EXPECT_EQ(engine.counters(0).stall_ns, 200);
  order(in, compute);
  kernel(compute, {}, 100);
  EXPECT_EQ(engine.counters(0).stall_ns, 200) << "the second wait was for something past";
}

TEST_F(EngineClock, AStallBeginsWhereTheHostWouldHaveLetTheKernelRun) {
  DeviceConfig config = engine.config();
  config.launch_ns = 40;
  engine.configure(config);
  engine.submit_copy(
      in, Link::kHostToDevice, 300, {}, "copy", [] {}, Wait::kNo);  // host 40, copy 40 to 340
  order(in, compute);
  kernel(compute, {}, 100);  // host 80: launch bound until 80, stalled from 80 to 340
  EXPECT_EQ(engine.counters(0).launch_bound_ns, 80);
  EXPECT_EQ(engine.counters(0).stall_ns, 260);
}

TEST_F(EngineClock, TheTwoDirectionsDoNotHoldEachOtherUp) {
  engine.submit_copy(
      out, Link::kDeviceToHost, 300, {}, "copy", [] {}, Wait::kNo);
  engine.submit_copy(
      in, Link::kHostToDevice, 300, {}, "copy", [] {}, Wait::kNo);
  EXPECT_EQ(engine.stream_time_ns(out), 300);
  EXPECT_EQ(engine.stream_time_ns(in), 300);
}

TEST_F(EngineClock, CopiesOfOneDirectionShareItsLink) {
  engine.submit_copy(
      out, Link::kDeviceToHost, 300, {}, "copy", [] {}, Wait::kNo);
  engine.submit_copy(
      in, Link::kDeviceToHost, 300, {}, "copy", [] {}, Wait::kNo);
  EXPECT_EQ(engine.stream_time_ns(in), 600);
}

// A layered step: in each of eight layers a kernel, whose result of `bytes` is copied out beside the next one.
int64_t pipelined_step(Engine& engine, double kernel_ns, std::size_t bytes) {
  Stream* compute = engine.stream(0, 0);
  Stream* out = engine.stream(0, 1);
  const int64_t begin = engine.host_time_ns(0);
  for (int layer = 0; layer < 8; ++layer) {
    engine.begin_kernel(compute, {}, "layer", {.bytes = kernel_ns});
    Event done;
    engine.record(done, compute);
    engine.wait(out, done);
    engine.submit_copy(
        out, Link::kDeviceToHost, bytes, {}, "copy", [] {}, Wait::kNo);
  }
  engine.synchronize_device(0);
  return engine.host_time_ns(0) - begin;
}

TEST_F(EngineClock, AComputeBoundStepHidesItsCopies) { EXPECT_EQ(pipelined_step(engine, 100, 60), 8 * 100 + 60); }

TEST_F(EngineClock, ALinkBoundStepTakesAsLongAsItsCopies) {
  EXPECT_EQ(pipelined_step(engine, 100, 250), 100 + 8 * 250);
}

TEST_F(EngineClock, TheSameProgramTakesTheSameTimeOnEveryRun) {
  const int64_t first = pipelined_step(engine, 123.4567, 311);
  for (int run = 0; run < 20; ++run) {
    EXPECT_EQ(pipelined_step(engine, 123.4567, 311), first);
    Engine fresh(round_numbers());
    EXPECT_EQ(pipelined_step(fresh, 123.4567, 311), first);
  }
}

TEST_F(EngineClock, HowFastTheCopiesReallyRunChangesNothing) {
  const int64_t first = pipelined_step(engine, 100, 250);
  const Counters counters = engine.counters(0);
  engine.reset_counters(0);
  engine.pause(0, Link::kDeviceToHost);
  std::thread releaser([&] { engine.resume(0, Link::kDeviceToHost); });
  EXPECT_EQ(pipelined_step(engine, 100, 250), first);
  releaser.join();
  EXPECT_EQ(engine.counters(0).d2h, counters.d2h);
  EXPECT_EQ(engine.counters(0).host_wait_ns, counters.host_wait_ns);
}

TEST_F(EngineClock, AnEventIsCompleteWhenTheHostHasReachedItsTime) {
  Event event;
  kernel(compute, {}, 5500);
  engine.record(event, compute);
  int polls = 0;
  while (!engine.query(event)) ++polls;
  EXPECT_EQ(polls, 5) << "a query takes a microsecond";
  EXPECT_EQ(engine.host_time_ns(0), 6000);
  kernel(compute, {}, 2500);
  for (polls = 0; !engine.query(compute); ++polls) {
  }
  EXPECT_EQ(polls, 2);
}

TEST_F(EngineClock, ElapsedTimeIsExact) {
  Event begin, end;
  engine.record(begin, out);
  engine.submit_copy(
      out, Link::kDeviceToHost, 1 << 20, {}, "copy", [] {}, Wait::kNo);
  engine.record(end, out);
  EXPECT_THROW(engine.elapsed_ms(begin, end), UserError) << "the host has not got there";
  engine.synchronize(end);
  EXPECT_DOUBLE_EQ(engine.elapsed_ms(begin, end), (1 << 20) * 1e-6);
}

TEST_F(EngineClock, ABlockingCopyHoldsTheHostUp) {
  kernel(out, {}, 100);
  engine.submit_copy(
      out, Link::kDeviceToHost, 300, {}, "copy", [] {}, Wait::kForCompletion);
  EXPECT_EQ(engine.host_time_ns(0), 400);
}

TEST_F(EngineClock, DevicesHaveHostTimesOfTheirOwn) {
  DeviceConfig config = round_numbers();
  config.devices = 2;
  Engine two(config);
  two.begin_kernel(two.stream(0, 0), {}, "kernel", {.bytes = 100});
  two.synchronize_device(0);
  EXPECT_EQ(two.host_time_ns(0), 100);
  EXPECT_EQ(two.host_time_ns(1), 0);
}

TEST_F(EngineClock, AThreadWithATimelineOfItsOwnTakesItsTimeAlong) {
  engine.advance_host(0, 50);
  std::thread([&] {
    HostTimeline mine(engine);
    EXPECT_EQ(engine.host_time_ns(0), 50);
    engine.advance_host(0, 100);
    EXPECT_EQ(engine.host_time_ns(0), 150);
    std::thread([&] { EXPECT_EQ(engine.host_time_ns(0), 50) << "the others' time stands"; }).join();
  }).join();
  EXPECT_EQ(engine.host_time_ns(0), 150) << "joined";
}

TEST_F(EngineClock, CountersAreResetButForTheThreads) {
  engine.submit_copy(
      out, Link::kDeviceToHost, 300, {}, "copy", [] {}, Wait::kNo);
  kernel(compute, {});
  engine.synchronize_device(0);
  engine.reset_counters(0);
  Counters expected;
  expected.threads = 1;
  EXPECT_EQ(engine.counters(0), expected);
}

TEST_F(EngineClock, TheRecorderSeesKernelsCopiesWaitsAndMemory) {
  trace::Recorder recorder;
  engine.set_recorder(&recorder);
  Block* block = allocate(1000);
  kernel(compute, {writes(block)}, 100, "produce");
  Block* host = allocate_pinned(1000);
  order(compute, out);
  copy(out, block, host);
  order(out, compute);
  kernel(compute, {writes(block)}, 50, "overwrite");
  engine.synchronize(compute);
  engine.free(block);
  engine.free(host);
  engine.set_recorder(nullptr);

  using Span = std::pair<int64_t, int64_t>;
  const auto snapshot = recorder.snapshot();
  const auto span = [&](const char* track, const char* name) {
    const auto events = snapshot.find(track, name);
    return events.size() == 1 ? Span(events[0].begin_ns, events[0].end_ns) : Span(-1, -1);
  };
  EXPECT_EQ(span("sim:0/compute", "produce"), Span(0, 100));
  EXPECT_EQ(span("sim:0/copies out", "copy out"), Span(100, 1100));
  EXPECT_EQ(span("sim:0/compute", "wait"), Span(100, 1100));
  EXPECT_EQ(span("sim:0/compute", "overwrite"), Span(1100, 1150));
  EXPECT_EQ(span("sim:0/host", "synchronize stream"), Span(0, 1150));
  const auto memory = snapshot.find("sim:0/memory", "bytes in use");
  ASSERT_EQ(memory.size(), 2U);
  EXPECT_EQ(memory[0].value, 1024);
  EXPECT_EQ(memory[1].value, 0);
}

}  // namespace
}  // namespace neap::sim
