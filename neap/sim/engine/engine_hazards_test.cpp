// torch-free
// Programs that are wrong and programs that are right, most of them pairs that differ in one line. Wrong ones must be
// reported naming both sides, however the threads happened to run; right ones must not be.
#include <thread>

#include "neap/sim/engine/engine_fixture.h"

namespace neap::sim {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Hazards : public EngineTest {
 protected:
  void SetUp() override {
    device = allocate(4000);
    host = allocate_pinned(4000);
    fill(device, 7);
  }
  void TearDown() override {
    engine.synchronize_device(0);
    if (device != nullptr) engine.free(device);
    if (host != nullptr) engine.free(host);
    EngineTest::TearDown();
  }
  // Moves no bytes: under ThreadSanitizer a wrong program must be reported by us alone.
  void copy(Stream* on, Block* from, Block* to) {
    const Range ranges[] = {reads(from), writes(to)};
    engine.submit_copy(
        on, to->pinned() ? Link::kDeviceToHost : Link::kHostToDevice, from->bytes(), ranges,
        to->pinned() ? "copy out" : "copy in", [] {}, Wait::kNo);
  }
  // The usual offload: the out-stream waits for the producer, then copies.
  void offload() {
    order(compute, out);
    copy(out, device, host);
  }
  void free_device() { engine.free(std::exchange(device, nullptr)); }
  void expect_hazard(const char* first, const char* second) {
    EXPECT_THAT(engine.take_hazards(), ElementsAre(AllOf(HasSubstr(first), HasSubstr(second))));
  }
  void expect_none() { EXPECT_THAT(engine.take_hazards(), IsEmpty()); }

  Block* device = nullptr;
  Block* host = nullptr;
};

// ---- out of the device
// --------------------------------------------------------------------------------------------------

TEST_F(Hazards, WrongTheCopyDoesNotWaitForTheProducer) {
  copy(out, device, host);
  expect_hazard("'copy out' on sim:0 stream 1 reads, bytes 0 to 4000",
                "without being ordered after what 'fill' on sim:0 stream 0 writes, bytes 0 to 4000");
}

TEST_F(Hazards, RightTheCopyWaitsForTheProducer) {
  offload();
  expect_none();
}

TEST_F(Hazards, WrongTheSourceIsOverwrittenWhileTheCopyReadsIt) {
  offload();
  kernel(compute, {writes(device)}, 1, "add_");
  expect_hazard("'add_' on sim:0 stream 0 writes", "'copy out' on sim:0 stream 1 reads");
}

TEST_F(Hazards, RightTheSourceIsReadWhileTheCopyReadsIt) {
  offload();
  kernel(compute, {reads(device)}, 1, "mul");
  expect_none();
}

TEST_F(Hazards, RightTheSourceIsOverwrittenAfterAWaitForTheCopy) {
  offload();
  order(out, compute);
  kernel(compute, {writes(device)}, 1, "add_");
  expect_none();
}

TEST_F(Hazards, WrongTheEventWasRecordedBeforeTheCopyNotAfterIt) {
  Event event;
  order(compute, out);
  engine.record(event, out);
  copy(out, device, host);
  engine.wait(compute, event);
  kernel(compute, {writes(device)}, 1, "add_");
  expect_hazard("'add_'", "'copy out'");
}

TEST_F(Hazards, WrongTheEventThatIsWaitedForWasRecordedAgainElsewhere) {
  Event event;
  offload();
  engine.record(event, out);
  engine.record(event, in);  // the handle is reused before the wait
  engine.wait(compute, event);
  kernel(compute, {writes(device)}, 1, "add_");
  expect_hazard("'add_'", "'copy out'");
}

TEST_F(Hazards, RightTheWaitWasMadeBeforeTheEventWasRecordedAgain) {
  Event event;
  offload();
  engine.record(event, out);
  engine.wait(compute, event);
  engine.record(event, in);
  kernel(compute, {writes(device)}, 1, "add_");
  expect_none();
}

// ---- into the device
// ----------------------------------------------------------------------------------------------------

TEST_F(Hazards, WrongAKernelReadsBeforeTheCopyInHasArrived) {
  order(compute, in);
  copy(in, host, device);
  kernel(compute, {reads(device)}, 1, "mul");
  expect_hazard("'mul' on sim:0 stream 0 reads", "'copy in' on sim:0 stream 2 writes");
}

TEST_F(Hazards, RightAKernelWaitsForTheCopyIn) {
  order(compute, in);
  copy(in, host, device);
  order(in, compute);
  kernel(compute, {reads(device)}, 1, "mul");
  expect_none();
}

TEST_F(Hazards, WrongTheCopyInIsNotOrderedAfterTheAllocationOfItsTarget) {
  Block* fresh = allocate(4000);
  copy(in, host, fresh);
  expect_hazard("'copy in'", "'allocation' on sim:0 stream 0 writes");
  engine.synchronize(in);
  engine.free(fresh);
}

TEST_F(Hazards, WrongTheHostBufferIsReadBackBeforeItWasWritten) {
  offload();
  Block* back = allocate(4000);
  order(compute, in);
  copy(in, host, back);
  expect_hazard("'copy in' on sim:0 stream 2 reads", "'copy out' on sim:0 stream 1 writes");
  engine.synchronize(in);
  engine.free(back);
}

TEST_F(Hazards, RightTheHostBufferIsReadBackAfterTheCopyOut) {
  offload();
  Block* back = allocate(4000);
  order(compute, in);
  order(out, in);
  copy(in, host, back);
  expect_none();
  engine.synchronize(in);
  engine.free(back);
}

TEST_F(Hazards, WrongAHostBufferIsReusedWhileACopyStillReadsIt) {
  order(compute, in);
  copy(in, host, device);
  Block* other = allocate(4000);
  order(compute, out);
  copy(out, other, host);
  expect_hazard("'copy out' on sim:0 stream 1 writes", "'copy in' on sim:0 stream 2 reads");
  engine.synchronize(out);
  engine.free(other);
}

// ---- free and reuse
// -----------------------------------------------------------------------------------------------------

TEST_F(Hazards, WrongMemoryIsReusedThatACopyStillReads) {
  offload();
  free_device();
  expect_none();
  engine.free(allocate(1));
  expect_hazard("was freed and may be reused without being ordered after", "'copy out' on sim:0 stream 1 reads");
}

TEST_F(Hazards, WrongEvenWhenTheCopyHadLongFinished) {
  offload();
  engine.drain(out);  // really done, but nothing in the program says so
  free_device();
  engine.free(allocate(1));
  expect_hazard("was freed and may be reused", "'copy out'");
}

TEST_F(Hazards, WrongAtOnceWhenTheFreeItselfIsHeldToIt) {
  DeviceConfig config = engine.config();
  config.strict_free = true;
  engine.configure(config);
  offload();
  free_device();
  expect_hazard("is freed without its home stream being ordered after", "'copy out' on sim:0 stream 1 reads");
}

TEST_F(Hazards, RightFreedEarlyAndOrderedBeforeTheReuse) {
  offload();
  free_device();
  order(out, compute);
  engine.free(allocate(1));
  expect_none();
}

TEST_F(Hazards, RightTheHomeStreamWaitsBeforeTheFree) {
  offload();
  order(out, compute);
  free_device();
  engine.free(allocate(1));
  expect_none();
}

TEST_F(Hazards, RightTheHostWaitsForTheCopyBeforeTheFree) {
  Event event;
  offload();
  engine.record(event, out);
  engine.synchronize(event);
  free_device();
  engine.free(allocate(1));
  expect_none();
}

TEST_F(Hazards, RightTheHostPollsUntilTheCopyIsDone) {
  Event event;
  offload();
  engine.record(event, out);
  while (!engine.query(event)) {
  }
  free_device();
  engine.free(allocate(1));
  expect_none();
}

TEST_F(Hazards, RightTheOtherStreamIsRecorded) {
  offload();
  engine.record_stream(device, out);
  free_device();
  engine.free(allocate(1));
  expect_none();
}

TEST_F(Hazards, WrongADifferentStreamIsRecorded) {
  offload();
  engine.record_stream(device, in);
  free_device();
  engine.free(allocate(1));
  expect_hazard("was freed and may be reused", "'copy out'");
}

TEST_F(Hazards, WrongUseAfterFree) {
  Block* stale = device;
  order(compute, out);
  free_device();
  copy(out, stale, host);
  EXPECT_THAT(engine.take_hazards(), ElementsAre(HasSubstr("'copy out' on sim:0 stream 1 reads, bytes 0 to 4000 after "
                                                           "it was freed")));
}

TEST_F(Hazards, RightAPinnedBlockIsFreedWhileACopyUsesIt) {
  offload();
  engine.free(std::exchange(host, nullptr));
  engine.synchronize(out);
  expect_none();
}

// ---- the host
// -----------------------------------------------------------------------------------------------------------

TEST_F(Hazards, WrongTheHostReadsBeforeTheCopyOutIsDone) {
  offload();
  engine.host_read(host->data(), 4, "loss");
  expect_hazard("the host's loss reads bytes 0 to 4", "'copy out' on sim:0 stream 1 writes");
}

TEST_F(Hazards, RightTheHostReadsAfterItWaited) {
  offload();
  engine.synchronize(out);
  engine.host_read(host->data(), 4000, "loss");
  expect_none();
}

TEST_F(Hazards, WrongTheHostWritesWhatACopyStillReads) {
  order(compute, in);
  copy(in, host, device);
  engine.host_read(host->data(), 4000, "check");
  expect_none();
  engine.host_write(static_cast<char*>(host->data()) + 3999, 1, "next batch");
  expect_hazard("the host's next batch writes bytes 3999 to 4000", "'copy in' on sim:0 stream 2 reads");
}

TEST_F(Hazards, RightTheHostTouchesOtherMemory) {
  offload();
  std::vector<char> elsewhere(100);
  engine.host_write(elsewhere.data(), elsewhere.size(), "next batch");
  expect_none();
}

TEST_F(Hazards, WrongAnotherTimelineHasNotSeenTheHostsWait) {
  offload();
  std::thread([&] {
    HostTimeline rank(engine);
    std::thread([&] { engine.synchronize(out); }).join();  // known to the shared host, not to this rank
    engine.host_read(host->data(), 4, "loss");
    expect_hazard("the host's loss reads", "'copy out'");
  }).join();
  engine.host_read(host->data(), 4, "loss");
  expect_none();
}

// ---- ranges and transitivity
// ----------------------------------------------------------------------------------------------

TEST_F(Hazards, RightDisjointRangesOfOneBlock) {
  order(compute, in);
  const Range low[] = {{device, 0, 2000, true}};
  engine.submit_copy(
      in, Link::kHostToDevice, 2000, low, "copy in", [] {}, Wait::kNo);
  kernel(compute, {{device, 2000, 4000, true}}, 1, "zero_");
  expect_none();
}

TEST_F(Hazards, WrongRangesThatOverlapByOneByte) {
  order(compute, in);
  const Range low[] = {{device, 0, 2001, true}};
  engine.submit_copy(
      in, Link::kHostToDevice, 2001, low, "copy in", [] {}, Wait::kNo);
  kernel(compute, {{device, 2000, 4000, true}}, 1, "zero_");
  expect_hazard("'zero_' on sim:0 stream 0 writes, bytes 2000 to 4000",
                "'copy in' on sim:0 stream 2 writes, bytes 0 to 2001");
}

TEST_F(Hazards, RightOrderPassesThroughAThirdStream) {
  offload();
  order(out, in);
  order(in, compute);
  kernel(compute, {writes(device)}, 1, "add_");
  expect_none();
}

TEST_F(Hazards, WrongEveryUnorderedSideIsNamed) {
  offload();
  order(compute, in);
  const Range ranges[] = {reads(device)};
  engine.submit_copy(
      in, Link::kPeer, 4000, ranges, "copy peer", [] {}, Wait::kNo);
  kernel(compute, {writes(device)}, 1, "add_");
  EXPECT_THAT(engine.take_hazards(), ElementsAre(AllOf(HasSubstr("'add_'"), HasSubstr("'copy out'")),
                                                 AllOf(HasSubstr("'add_'"), HasSubstr("'copy peer'"))));
}

TEST_F(Hazards, AtMostAHundredAreKept) {
  for (int i = 0; i < 300; ++i) {
    kernel(compute, {writes(device)}, 1, "a");
    kernel(out, {writes(device)}, 1, "b");
  }
  EXPECT_THAT(engine.take_hazards(), SizeIs(100));
}

TEST_F(Hazards, NothingIsReportedWhenTheCheckIsOff) {
  DeviceConfig config = engine.config();
  config.hazard_check = false;
  engine.configure(config);
  copy(out, device, host);
  kernel(compute, {writes(device)});
  free_device();
  engine.free(allocate(1));
  expect_none();
}

TEST_F(Hazards, DevicesAreOrderedByEventsAcrossThem) {
  DeviceConfig config = round_numbers();
  config.devices = 2;
  Engine two(config);
  Stream* first = two.stream(0, 0);
  Stream* second = two.stream(1, 0);
  MemoryShortage shortage;
  Block* block = two.allocate(first, 100, &shortage);
  const Range read[] = {{block, 0, 100, false}};
  two.begin_kernel(second, read, "peer read", {});
  EXPECT_THAT(two.take_hazards(), ElementsAre(AllOf(HasSubstr("'peer read' on sim:1 stream 0"), HasSubstr("sim:0"))));
  Event event;
  two.record(event, first);
  two.wait(second, event);
  two.begin_kernel(second, read, "peer read", {});
  EXPECT_THAT(two.take_hazards(), IsEmpty());
  two.free(block);
}

}  // namespace
}  // namespace neap::sim
