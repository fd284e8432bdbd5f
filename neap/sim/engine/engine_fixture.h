// torch-free
// What the tests of the engine share: one engine with a compute, an out- and an in-stream and round numbers for costs.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "neap/base/error.h"
#include "neap/sim/engine/engine.h"

namespace neap::sim {

// Kernels take as many nanoseconds as they move bytes, copies as well; nothing else takes time.
inline DeviceConfig round_numbers() {
  DeviceConfig config;
  config.d2h_gbps = config.h2d_gbps = config.peer_gbps = 1;
  config.hbm_gbps = 1;
  config.gflops = 1;
  config.latency_ns = config.launch_ns = config.event_ns = config.kernel_min_ns = 0;
  config.hazard_check = true;
  return config;
}

class EngineTest : public ::testing::Test {
 protected:
  explicit EngineTest(const DeviceConfig& config = round_numbers(),
                      std::chrono::nanoseconds patience = std::chrono::seconds(30))
      : engine(config, patience),
        compute(engine.stream(0, 0)),
        out(engine.pool_stream(0, false)),
        in(engine.pool_stream(0, false)) {}

  // Hazards and bytes are looked at after every test.
  void TearDown() override {
    engine.synchronize_device(0);
    EXPECT_THAT(engine.take_hazards(), ::testing::IsEmpty());
    EXPECT_EQ(engine.memory(0).current, 0);
    EXPECT_EQ(engine.memory(0).live_blocks, 0);
    EXPECT_EQ(engine.pinned_memory().current, 0);
  }

  Block* allocate(std::size_t bytes, Stream* on = nullptr) {
    MemoryShortage shortage;
    Block* block = engine.allocate(on != nullptr ? on : compute, bytes, &shortage);
    EXPECT_NE(block, nullptr) << shortage.text();
    return block;
  }
  Block* allocate_pinned(std::size_t bytes) {
    MemoryShortage shortage;
    return engine.allocate_pinned(bytes, &shortage);
  }
  static Range reads(Block* block) { return {block, 0, block->bytes(), false}; }
  static Range writes(Block* block) { return {block, 0, block->bytes(), true}; }

  // A kernel of so many nanoseconds on the virtual clock.
  void kernel(Stream* on, std::vector<Range> ranges, double nanoseconds = 100, const char* what = "kernel") {
    engine.begin_kernel(on, ranges, what, {.bytes = nanoseconds});
  }
  void fill(Block* block, unsigned char value, double nanoseconds = 100) {
    kernel(compute, {writes(block)}, nanoseconds, "fill");
    std::memset(block->data(), value, block->bytes());
  }
  void copy(Stream* on, Block* from, Block* to, Wait wait = Wait::kNo) {
    const Link link = to->pinned() ? Link::kDeviceToHost : Link::kHostToDevice;
    const Range ranges[] = {reads(from), writes(to)};
    engine.submit_copy(
        on, link, from->bytes(), ranges, to->pinned() ? "copy out" : "copy in",
        [source = from->data(), target = to->data(), bytes = from->bytes()] { std::memcpy(target, source, bytes); },
        wait);
  }
  void order(Stream* first, Stream* then) {
    Event event;
    engine.record(event, first);
    engine.wait(then, event);
  }
  static unsigned char byte_of(const Block* block, std::size_t i = 0) {
    return static_cast<const unsigned char*>(block->data())[i];
  }

  Engine engine;
  Stream* const compute;
  Stream* const out;
  Stream* const in;
};

}  // namespace neap::sim
