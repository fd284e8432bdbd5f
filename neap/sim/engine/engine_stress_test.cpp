// torch-free
// Many threads, real buffers, every byte checked. Means most under ThreadSanitizer and AddressSanitizer.
#include <atomic>
#include <thread>

#include "neap/sim/engine/engine_fixture.h"

namespace neap::sim {
namespace {

constexpr std::size_t kBytes = 16 << 10;
constexpr int kBlocks = 6;

enum class Release { kRecordStream, kStreamWaits, kHostWaits, kMixed };

// One rank: offloads blocks and brings them back, in the ways programs do it. Returns how many bytes were wrong.
class Rank {
 public:
  Rank(Engine& engine, int device, Release release)
      : engine_(engine),
        device_(device),
        release_(release),
        compute_(engine.stream(device, 0)),
        out_(engine.stream(device, 1)),
        in_(engine.stream(device, 2)) {}

  int run(int rounds) {
    Engine::exchange_device(device_);
    int wrong = 0;
    for (int round = 0; round < rounds; ++round) {
      std::vector<Block*> host;
      for (int i = 0; i < kBlocks; ++i) host.push_back(send(round, i));
      for (int i = kBlocks - 1; i >= 0; --i) wrong += bring_back(host[static_cast<std::size_t>(i)], round, i);
    }
    engine_.synchronize_device(device_);
    return wrong;
  }

 private:
  static unsigned char value(int device, int round, int i) {
    return static_cast<unsigned char>(device * 100 + round * kBlocks + i);
  }
  Block* send(int round, int i) {
    MemoryShortage shortage;
    Block* block = engine_.allocate(compute_, kBytes, &shortage);
    const Range write[] = {{block, 0, kBytes, true}};
    engine_.begin_kernel(compute_, write, "fill", {.bytes = kBytes});
    std::memset(block->data(), value(device_, round, i), kBytes);
    Block* host = engine_.allocate_pinned(kBytes, &shortage);
    Event event;
    engine_.record(event, compute_);
    engine_.wait(out_, event);
    move(out_, Link::kDeviceToHost, block, host);
    engine_.record(event, out_);
    const Release how = release_ == Release::kMixed ? static_cast<Release>(i % 3) : release_;
    if (how == Release::kRecordStream) engine_.record_stream(block, out_);
    if (how == Release::kStreamWaits) engine_.wait(compute_, event);
    if (how == Release::kHostWaits) engine_.synchronize(event);
    engine_.free(block);
    return host;
  }
  int bring_back(Block* host, int round, int i) {
    MemoryShortage shortage;
    Block* block = engine_.allocate(compute_, kBytes, &shortage);
    Event event;
    engine_.record(event, out_);
    engine_.wait(in_, event);
    engine_.record(event, compute_);
    engine_.wait(in_, event);
    move(in_, Link::kHostToDevice, host, block);
    engine_.record(event, in_);
    engine_.wait(compute_, event);
    const Range read[] = {{block, 0, kBytes, false}};
    engine_.begin_kernel(compute_, read, "check", {.bytes = kBytes});
    int wrong = 0;
    for (std::size_t j = 0; j < kBytes; j += 512)
      wrong += static_cast<const unsigned char*>(block->data())[j] != value(device_, round, i);
    engine_.free(block);
    engine_.free(host);
    return wrong;
  }
  void move(Stream* on, Link link, Block* from, Block* to) {
    const Range ranges[] = {{from, 0, kBytes, false}, {to, 0, kBytes, true}};
    // Half of them plain bytes, which find now a quiet stream and now one that is busy.
    if (++moves_ % 2 == 0) {
      return engine_.submit_copy(on, link, {to->data(), from->data(), kBytes}, ranges, "copy", Wait::kNo);
    }
    const auto work = [source = from->data(), target = to->data()] { std::memcpy(target, source, kBytes); };
    engine_.submit_copy(on, link, kBytes, ranges, "copy", work, Wait::kNo);
  }

  Engine& engine_;
  int device_;
  Release release_;
  int moves_ = 0;
  Stream *compute_, *out_, *in_;
};

TEST(EngineStress, RanksAsThreadsPipelineCopiesOfTheirOwnDevices) {
  for (const Release release : {Release::kRecordStream, Release::kStreamWaits, Release::kHostWaits, Release::kMixed}) {
    DeviceConfig config;
    config.devices = 3;
    config.hazard_check = true;
    config.poison = true;
    Engine engine(config);
    std::atomic<int> wrong{0};
    std::vector<std::thread> ranks;
    for (int device = 0; device < 3; ++device)
      ranks.emplace_back([&, device] { wrong += Rank(engine, device, release).run(30); });
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_THAT(engine.take_hazards(), ::testing::IsEmpty());
    for (int device = 0; device < 3; ++device) {
      EXPECT_EQ(engine.memory(device).current, 0);
      EXPECT_EQ(engine.counters(device).d2h.copies, 30 * kBlocks);
    }
    EXPECT_EQ(engine.pinned_memory().current, 0);
  }
}

TEST(EngineStress, AThreadedRunTakesTheSameVirtualTimeAsALoneOne) {
  const auto time_of = [](int devices) {
    DeviceConfig config;
    config.devices = devices;
    Engine engine(config);
    std::vector<std::thread> ranks;
    for (int device = 0; device < devices; ++device)
      ranks.emplace_back([&, device] { Rank(engine, device, Release::kMixed).run(10); });
    for (std::thread& rank : ranks) rank.join();
    return std::pair(engine.host_time_ns(0), engine.memory(0).peak);
  };
  EXPECT_EQ(time_of(3), time_of(1));
}

TEST(EngineStress, ReportsMayBeReadWhileWorkGoesOn) {
  Engine engine({.hazard_check = true});
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      engine.memory(0);
      engine.counters(0);
      engine.reset_peak(0);
      engine.host_time_ns(0);
      engine.take_hazards();
      int unknown = 0;
      engine.find_device(&unknown);
      engine.host_read(&unknown, sizeof unknown, "probe");
    }
  });
  EXPECT_EQ(Rank(engine, 0, Release::kMixed).run(50), 0);
  stop = true;
  reader.join();
  EXPECT_EQ(engine.memory(0).current, 0);
}

TEST(EngineStress, LinksMayBePausedAndResumedAtAnyTime) {
  DeviceConfig config;
  config.hazard_check = true;
  Engine engine(config);
  std::atomic<bool> stop{false};
  std::thread toggler([&] {
    while (!stop)
      for (const Link link : {Link::kDeviceToHost, Link::kHostToDevice}) {
        engine.pause(0, link);
        std::this_thread::yield();
        engine.resume(0, link);
      }
  });
  EXPECT_EQ(Rank(engine, 0, Release::kMixed).run(30), 0);
  stop = true;
  toggler.join();
  EXPECT_THAT(engine.take_hazards(), ::testing::IsEmpty());
}

TEST(EngineStress, BlocksAndStreamsAreMadeAndDroppedByManyThreads) {
  Engine engine({.hazard_check = true});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      MemoryShortage shortage;
      Stream* mine = engine.new_stream(0);
      for (int i = 0; i < 500; ++i) {
        Block* block = engine.allocate(mine, 1000, &shortage);
        const Range write[] = {{block, 0, 1000, true}};
        engine.submit_copy(
            mine, Link::kHostToDevice, 1000, write, "copy", [] {}, Wait::kNo);
        engine.free(block);
      }
      engine.synchronize(mine);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(engine.memory(0).current, 0);
  EXPECT_EQ(engine.memory(0).allocations, 2000);
  EXPECT_THAT(engine.take_hazards(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace neap::sim
