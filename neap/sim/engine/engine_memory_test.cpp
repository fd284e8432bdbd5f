// torch-free
#include <cmath>
#include <latch>

#include "neap/sim/engine/engine_fixture.h"
#include "testing/error_of.h"

namespace neap::sim {
namespace {

using ::testing::HasSubstr;

DeviceConfig with_capacity(int64_t bytes) {
  DeviceConfig config = round_numbers();
  config.capacity = Bytes(bytes);
  return config;
}

class EngineMemory : public EngineTest {
 protected:
  EngineMemory() : EngineTest(with_capacity(4096)) {}
};

TEST_F(EngineMemory, CountsBytesRoundedToTheGranularityAndAsAsked) {
  Block* a = allocate(1);
  Block* b = allocate(512);
  Block* c = allocate(513);
  const MemoryStats stats = engine.memory(0);
  EXPECT_EQ(stats.current, 512 + 512 + 1024);
  EXPECT_EQ(stats.requested, 1 + 512 + 513);
  EXPECT_EQ(stats.live_blocks, 3);
  EXPECT_EQ(stats.capacity, 4096);
  for (Block* block : {a, b, c}) engine.free(block);
}

TEST_F(EngineMemory, ReturnsToTheExactBaselineAndKeepsThePeak) {
  const MemoryStats before = engine.memory(0);
  engine.free(allocate(1000));
  Block* both[] = {allocate(600), allocate(700)};
  for (Block* block : both) engine.free(block);
  const MemoryStats after = engine.memory(0);
  EXPECT_EQ(after.current, before.current);
  EXPECT_EQ(after.requested, before.requested);
  EXPECT_EQ(after.live_blocks, before.live_blocks);
  EXPECT_EQ(after.peak, 2048);
  EXPECT_EQ(after.requested_peak, 1300);
  EXPECT_EQ(after.allocations, 3);
  EXPECT_EQ(after.frees, 3);
  engine.reset_peak(0);
  EXPECT_EQ(engine.memory(0).peak, 0);
  EXPECT_EQ(engine.memory(0).requested_peak, 0);
}

TEST_F(EngineMemory, AnEmptyBlockIsChargedNothing) {
  Block* block = allocate(0);
  EXPECT_NE(block->data(), nullptr);
  EXPECT_EQ(engine.memory(0).current, 0);
  engine.free(block);
}

TEST_F(EngineMemory, RefusesWhatDoesNotFitAndSaysWhy) {
  Block* block = allocate(3000);
  MemoryShortage shortage;
  EXPECT_EQ(engine.allocate(compute, 2000, &shortage), nullptr);
  EXPECT_EQ(shortage.device, 0);
  EXPECT_EQ(shortage.asked, 2000);
  EXPECT_EQ(shortage.free, 4096 - 3072);
  EXPECT_EQ(shortage.current, 3072);
  EXPECT_EQ(shortage.peak, 3072);
  EXPECT_EQ(shortage.capacity, 4096);
  EXPECT_THAT(shortage.text(), HasSubstr("sim:0 is out of memory: asked 1.95 KiB, free 1.00 KiB, in use 3.00 KiB"));
  EXPECT_EQ(engine.memory(0).out_of_memory, 1);
  EXPECT_EQ(engine.memory(0).current, 3072) << "a refusal leaves no trace";
  engine.free(block);
  engine.free(allocate(4096));
}

TEST_F(EngineMemory, AdoptedMemoryIsChargedAndDroppedOnce) {
  std::vector<char> memory(700);
  int drops = 0;
  MemoryShortage shortage;
  const auto drop = [](void* count) { ++*static_cast<int*>(count); };
  Block* block = engine.adopt(compute, memory.data(), memory.size(), drop, &drops, &shortage);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(block->data(), memory.data());
  EXPECT_EQ(engine.memory(0).current, 1024);
  EXPECT_EQ(engine.counters(0).adopted, 1);
  EXPECT_EQ(drops, 0);
  engine.free(block);
  EXPECT_EQ(drops, 1);
  EXPECT_EQ(engine.adopt(compute, memory.data(), 5000, drop, &drops, &shortage), nullptr);
  EXPECT_EQ(drops, 1) << "what was not adopted is still the caller's";
}

TEST_F(EngineMemory, AQueuedCopyKeepsTheMemoryOfAFreedBlock) {
  Block* device = allocate(1000);
  Block* host = allocate_pinned(1000);
  fill(device, 42);
  order(compute, out);
  engine.pause(0, Link::kDeviceToHost);
  copy(out, device, host);
  order(out, compute);
  engine.free(device);
  EXPECT_EQ(engine.memory(0).current, 0) << "freed in stream order: later work of the home stream may have the bytes";
  engine.resume(0, Link::kDeviceToHost);
  engine.synchronize(out);
  EXPECT_EQ(byte_of(host, 999), 42);
  engine.free(host);
}

TEST_F(EngineMemory, ARecordedStreamDefersTheFreeUntilItHasPassed) {
  Block* device = allocate(1000);
  Block* host = allocate_pinned(1000);
  fill(device, 1);
  order(compute, out);
  copy(out, device, host);
  engine.record_stream(device, out);
  engine.free(device);
  EXPECT_EQ(engine.memory(0).current, 1024);
  EXPECT_EQ(engine.memory(0).live_blocks, 1);
  engine.synchronize(out);
  EXPECT_EQ(engine.memory(0).current, 0);
  engine.free(host);
}

TEST_F(EngineMemory, WhenFullTheHostWaitsForDeferredFreesBeforeItFails) {
  Block* device = allocate(3000);
  Block* host = allocate_pinned(3000);
  fill(device, 1);
  order(compute, out);
  copy(out, device, host);
  engine.record_stream(device, out);
  engine.free(device);
  Block* next = allocate(3000);
  EXPECT_EQ(engine.counters(0).memory_waits, 1);
  EXPECT_EQ(engine.host_time_ns(0), 100 + 3000) << "fill, then copy";
  engine.free(next);
  engine.free(host);
}

TEST_F(EngineMemory, ADeferredFreeWaitsForAHeldLinkWhateverTheClockSays) {
  Block* device = allocate(1000);
  Block* host = allocate_pinned(1000);
  fill(device, 1);
  order(compute, out);
  engine.pause(0, Link::kDeviceToHost);
  copy(out, device, host);
  engine.record_stream(device, out);
  engine.free(device);
  engine.advance_host(0, 1e6);
  EXPECT_EQ(engine.memory(0).current, 1024);
  engine.resume(0, Link::kDeviceToHost);
  EXPECT_EQ(engine.memory(0).current, 0);
  EXPECT_EQ(byte_of(host), 1);
  engine.free(host);
}

TEST_F(EngineMemory, FindsBlocksByAddress) {
  Block* device = allocate(1000);
  Block* host = allocate_pinned(1000);
  const auto at = [](const Block* block, std::size_t i) { return static_cast<const char*>(block->data()) + i; };
  EXPECT_EQ(engine.find_device(at(device, 999)), 0);
  EXPECT_EQ(engine.find_pinned(at(device, 0)), nullptr);
  EXPECT_EQ(engine.find_pinned(at(host, 999)), host);
  EXPECT_EQ(engine.find_pinned(at(host, 0)), host);
  EXPECT_EQ(engine.find_device(at(host, 0)), kHostDevice);
  int elsewhere = 0;
  EXPECT_EQ(engine.find_pinned(&elsewhere), nullptr);
  EXPECT_EQ(engine.find_device(&elsewhere), kHostDevice);
  engine.free(host);
  engine.free(device);
}

TEST_F(EngineMemory, PinnedMemoryHasItsOwnBookAndLimit) {
  DeviceConfig config = engine.config();
  config.pinned_capacity = Bytes(1500);
  engine.configure(config);
  Block* host = allocate_pinned(1000);
  MemoryShortage shortage;
  EXPECT_EQ(engine.allocate_pinned(501, &shortage), nullptr);
  EXPECT_THAT(shortage.text(), HasSubstr("page-locked host memory is out of memory: asked 501 B, free 500 B"));
  EXPECT_EQ(engine.pinned_memory().current, 1000) << "exact: nothing is rounded";
  EXPECT_EQ(engine.pinned_memory().out_of_memory, 1);
  EXPECT_EQ(engine.memory(0).current, 0);
  engine.free(host);
  EXPECT_EQ(engine.pinned_memory().peak, 1000);
  engine.reset_pinned_peak();
  EXPECT_EQ(engine.pinned_memory().peak, 0);
}

TEST_F(EngineMemory, PoisonedMemoryReadsAsNan) {
  DeviceConfig config = engine.config();
  config.poison = true;
  engine.configure(config);
  Block* block = allocate(sizeof(double));
  EXPECT_TRUE(std::isnan(*static_cast<const double*>(block->data())));
  EXPECT_TRUE(std::isnan(*static_cast<const float*>(block->data())));
  engine.free(block);
}

TEST_F(EngineMemory, FreeingTwiceIsReportedNotCrashed) {
  Block* block = allocate(1000);
  engine.free(block);
  engine.free(block);
  EXPECT_THAT(engine.take_hazards(), ::testing::ElementsAre(HasSubstr("is freed twice")));
  EXPECT_EQ(engine.memory(0).current, 0);
}

TEST_F(EngineMemory, DevicesHaveCapacitiesOfTheirOwn) {
  DeviceConfig config = with_capacity(1024);
  config.devices = 2;
  Engine two(config);
  MemoryShortage shortage;
  Block* a = two.allocate(two.stream(0, 0), 1000, &shortage);
  Block* b = two.allocate(two.stream(1, 0), 1000, &shortage);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_EQ(two.memory(1).current, 1024);
  EXPECT_EQ(two.find_device(b->data()), 1);
  two.free(a);
  EXPECT_EQ(two.memory(0).current, 0);
  EXPECT_EQ(two.memory(1).current, 1024);
  two.free(b);
}

TEST(EngineConfig, RejectsValuesThatMakeNoSense) {
  const auto error_of = [](auto change) -> std::string {
    DeviceConfig config;
    change(config);
    return testing::error_of([&] { Engine engine(config); });
  };
  EXPECT_THAT(error_of([](DeviceConfig& c) { c.devices = 0; }), HasSubstr("[sim.count] expected 1 to 8; found 0"));
  EXPECT_THAT(error_of([](DeviceConfig& c) { c.capacity = Bytes(0); }), HasSubstr("[sim.capacity]"));
  EXPECT_THAT(error_of([](DeviceConfig& c) { c.d2h_gbps = -1; }), HasSubstr("[sim.d2h]"));
  EXPECT_THAT(error_of([](DeviceConfig& c) { c.h2d_gbps = std::nan(""); }), HasSubstr("[sim.h2d]"));
  EXPECT_THAT(error_of([](DeviceConfig& c) { c.gflops = 0; }), HasSubstr("[sim.gflops]"));
  EXPECT_EQ(error_of([](DeviceConfig&) {}), testing::kNoError);
}

TEST(EngineConfig, TheNumberOfDevicesIsFixedOnceUsed) {
  Engine engine;
  DeviceConfig config = engine.config();
  config.devices = 2;
  engine.configure(config);
  EXPECT_EQ(engine.device_count(), 2);
  engine.stream(1, 0);
  config.devices = 3;
  EXPECT_THROW(engine.configure(config), UserError);
  EXPECT_THROW(engine.stream(2, 0), UserError);
  EXPECT_THROW(engine.stream(0, kMaxStreams), UserError);
}

TEST(EngineConfig, ExpectsNothingQueued) {
  Engine engine;
  engine.pause(0, Link::kDeviceToHost);
  EXPECT_THROW(engine.configure({}), UserError);
  engine.submit_copy(
      engine.stream(0, 0), Link::kDeviceToHost, 1, {}, "copy", [] {}, Wait::kNo);
  EXPECT_THROW(engine.configure({}), UserError);
  engine.resume(0, Link::kDeviceToHost);
  engine.synchronize_device(0);
  engine.configure({});
}

// Ranks that are threads: the work of one rank's stream may wait for what another rank's thread has yet to do.
TEST(EngineDevices, AllocationDoesNotWaitForTheWorkOfAnotherDevice) {
  DeviceConfig config;
  config.devices = 2;
  Engine engine(config);
  MemoryShortage shortage;
  Stream* other = engine.stream(0, 1);
  Block* block = engine.allocate(engine.stream(0, 0), 512, &shortage);
  std::latch allocated(1);
  HostTask task;
  task.work = [&allocated] { allocated.wait(); };
  engine.submit_host_task(other, std::move(task));
  engine.record_stream(block, other);
  engine.free(block);
  engine.advance_host(0, 1e9);  // on the clock, the work is long over
  Block* second = engine.allocate(engine.stream(1, 0), 512, &shortage);
  ASSERT_NE(second, nullptr);
  allocated.count_down();
  EXPECT_EQ(engine.memory(0).current, 0) << "of its own device, it waits";
  engine.free(second);
}

}  // namespace
}  // namespace neap::sim
