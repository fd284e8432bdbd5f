#include "neap/memory/pool_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <span>
#include <thread>

namespace neap::memory {
namespace {

using namespace neap::literals;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Passes when the test says so.
class FakeFence {
 public:
  FakeFence() = default;
  explicit FakeFence(std::shared_ptr<std::atomic<bool>> passed) : passed_(std::move(passed)) {}
  bool is_null() const { return passed_ == nullptr; }
  bool query() const {
    if (throws) throw std::runtime_error("device lost");
    return is_null() || passed_->load();
  }
  void synchronize() const {
    if (!is_null()) passed_->store(true), ++waits;
  }

  static inline std::atomic<int> waits = 0;
  static inline std::atomic<bool> throws = false;

 private:
  std::shared_ptr<std::atomic<bool>> passed_;
};

std::shared_ptr<std::atomic<bool>> running_copy() { return std::make_shared<std::atomic<bool>>(false); }

// What a source did, kept beyond its life. `memory` false: sizes without bytes, for sizes no test machine has.
struct SourceLog {
  std::vector<int64_t> allocated;
  std::atomic<int64_t> live = 0;
  std::atomic<int> refuse = 0;
  bool throws = false;
  bool memory = true;
  bool powers_of_two = false;
  std::function<void()> meanwhile{};  // what another thread does while memory is being allocated
  std::mutex mutex;
};

class FakeSlab final : public SlabMemory {
 public:
  FakeSlab(SourceLog& log, int64_t size) : log_(log), size_(size), bytes_(log.memory ? size : 0) { log_.live += size_; }
  ~FakeSlab() override { log_.live -= size_; }
  std::byte* data() const noexcept override {
    return log_.memory ? const_cast<std::byte*>(bytes_.data()) : reinterpret_cast<std::byte*>(size_t{1} << 50);
  }
  bool pinned() const noexcept override { return true; }

 private:
  SourceLog& log_;
  int64_t size_;
  std::vector<std::byte> bytes_;
};

class FakeSource final : public SlabSource {
 public:
  explicit FakeSource(SourceLog& log) : log_(log) {}
  int64_t round_up(int64_t bytes) const override {
    return log_.powers_of_two ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))) : bytes;
  }
  std::unique_ptr<SlabMemory> allocate(int64_t bytes) override {
    if (log_.throws) throw std::runtime_error("source failed");
    if (log_.refuse > 0) return --log_.refuse, nullptr;
    if (log_.meanwhile) log_.meanwhile();
    std::lock_guard lock(log_.mutex);
    log_.allocated.push_back(bytes);
    return std::make_unique<FakeSlab>(log_, bytes);
  }

 private:
  SourceLog& log_;
};

using Pool = PoolCore<FakeFence>;

class PoolCoreTest : public testing::Test {
 protected:
  Pool& make(PoolOptions options) {
    pool_.emplace(options, std::make_unique<FakeSource>(log_));
    return *pool_;
  }
  // Every state a block can be in is counted once.
  void TearDown() override {
    FakeFence::throws = false;
    if (!pool_) return;
    const auto counters = pool_->counters();
    EXPECT_EQ(counters.locked, counters.in_use + counters.in_flight + counters.idle);
    EXPECT_EQ(counters.locked.count, log_.live);
    pool_.reset();
    EXPECT_EQ(log_.live, 0);
  }

  SourceLog log_;
  std::optional<Pool> pool_;
};

TEST_F(PoolCoreTest, CarvesSeveralBlocksOutOfOneSlab) {
  auto& pool = make({.slab_size = 1_MiB});
  const auto a = *pool.try_acquire(100);
  const auto b = *pool.try_acquire(5000);
  EXPECT_EQ(b.data - a.data, 4096);
  EXPECT_THAT(log_.allocated, testing::ElementsAre(1 << 20));
  const auto counters = pool.counters();
  EXPECT_EQ(counters.requested, Bytes(5100));
  EXPECT_EQ(counters.in_use, Bytes(3 * 4096));
  EXPECT_EQ(counters.acquires, 2);
  EXPECT_EQ(counters.hits, 1);
  pool.release(a, {});
  pool.release(b, {});
}

TEST_F(PoolCoreTest, ARequestOf129MiBCosts129MiB) {
  log_.memory = false;
  auto& pool = make({.slab_size = 64_MiB});
  const auto block = *pool.try_acquire((129_MiB).count);
  EXPECT_EQ(pool.counters().locked, 129_MiB);
  pool.release(block, {});
}

TEST_F(PoolCoreTest, UsesTheWholeSlabOfASourceThatRoundsUp) {
  log_.powers_of_two = true;
  log_.memory = false;
  auto& pool = make({.slab_size = 1_MiB});
  const auto big = *pool.try_acquire((129_MiB).count);
  const auto other = *pool.try_acquire((127_MiB).count);  // what the rounding added is not lost
  EXPECT_EQ(pool.counters().locked, 256_MiB);
  EXPECT_EQ(pool.counters().idle, 0_B);
  pool.release(big, {});
  pool.release(other, {});
}

TEST_F(PoolCoreTest, ReusesABlockOnlyAfterItsFenceHasPassed) {
  auto& pool = make({.slab_size = 8_KiB});
  const auto first = *pool.try_acquire(8192);
  const auto copy = running_copy();
  pool.release(first, FakeFence(copy));
  EXPECT_EQ(pool.counters().in_flight, 8_KiB);
  const auto second = *pool.try_acquire(8192);  // a slab more, rather than a wait or an early reuse
  EXPECT_NE(second.data, first.data);
  EXPECT_EQ(FakeFence::waits, 0);
  *copy = true;
  const auto third = *pool.try_acquire(8192);
  EXPECT_EQ(third.data, first.data);
  EXPECT_EQ(pool.counters().slab_allocations, 2);
  pool.release(second, {});
  pool.release(third, {});
}

TEST_F(PoolCoreTest, FindsAPassedFenceBehindOneThatHasNot) {
  auto& pool = make({.slab_size = 4_KiB, .host_limit = 8_KiB});
  const auto a = *pool.try_acquire(1);
  const auto b = *pool.try_acquire(1);
  const auto slow = running_copy();
  const auto quick = running_copy();
  pool.release(a, FakeFence(slow));
  pool.release(b, FakeFence(quick));
  *quick = true;
  const auto again = *pool.try_acquire(1);
  EXPECT_EQ(again.data, b.data);
  pool.release(again, {});
  *slow = true;
}

TEST_F(PoolCoreTest, ASteadyRunAllocatesNoSlabs) {
  auto& pool = make({.slab_size = 64_KiB});
  std::vector<PoolBlock> blocks;
  std::vector<const void*> first_addresses;
  for (int step = 0; step < 5; ++step) {
    std::vector<const void*> addresses;
    for (int64_t size : {5000, 100'000, 30'000, 8192, 60'000}) {
      blocks.push_back(*pool.try_acquire(size));
      addresses.push_back(blocks.back().data);
    }
    for (; !blocks.empty(); blocks.pop_back()) pool.release(blocks.back(), {});
    if (step == 1) first_addresses = addresses;
    if (step > 1) {
      EXPECT_EQ(addresses, first_addresses) << "places move between steps";
    }
  }
  const auto counters = pool.counters();
  EXPECT_EQ(counters.slab_allocations, std::ssize(log_.allocated));
  EXPECT_EQ(counters.acquires - counters.hits, counters.slab_allocations);
  EXPECT_EQ(counters.hits, 25 - counters.slab_allocations);
  EXPECT_LE(counters.slab_allocations, 4);
}

TEST_F(PoolCoreTest, KeepsNothingIdleWithACacheLimitOfZero) {
  auto& pool = make({.slab_size = 1_MiB, .cache_limit = 0_B});
  const auto a = *pool.try_acquire(100);
  const auto b = *pool.try_acquire(200);
  EXPECT_EQ(pool.counters().idle, 0_B);  // so slabs are no larger than the requests
  const auto copy = running_copy();
  pool.release(a, {});
  pool.release(b, FakeFence(copy));
  EXPECT_EQ(pool.counters().locked, 4_KiB) << "in flight is not idle";
  *copy = true;
  EXPECT_EQ(pool.counters().locked, 0_B);
  EXPECT_EQ(pool.counters().evictions, 2);
}

TEST_F(PoolCoreTest, GivesTheLeastRecentlyUsedSlabBackFirst) {
  auto& pool = make({.slab_size = 4_KiB, .cache_limit = 8_KiB});
  std::vector<PoolBlock> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(*pool.try_acquire(1));
  pool.release(blocks[1], {});
  pool.release(blocks[2], {});
  pool.release(blocks[0], {});  // 12 KiB would be idle: the slab of block 1, idle longest, goes
  EXPECT_EQ(pool.counters().idle, 8_KiB);
  const auto a = *pool.try_acquire(1);
  const auto b = *pool.try_acquire(1);
  EXPECT_EQ(a.memory, blocks[0].memory);
  EXPECT_EQ(b.memory, blocks[2].memory);
  pool.release(a, {});
  pool.release(b, {});
}

TEST_F(PoolCoreTest, IdleBytesNeverExceedTheCacheLimitWhateverHappens) {
  auto& pool = make({.slab_size = 16_KiB, .cache_limit = 40_KiB});
  std::mt19937 random(1);
  std::vector<PoolBlock> blocks;
  for (int step = 0; step < 2000; ++step) {
    if (blocks.empty() || random() % 2 == 0) {
      blocks.push_back(*pool.try_acquire(1 + static_cast<int64_t>(random() % 16384)));
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      pool.release(blocks.back(), {});
      blocks.pop_back();
    }
    const auto counters = pool.counters();
    // Pieces of slabs that are partly in use cannot be given back; everything else is within the limit.
    if (counters.idle > 40_KiB) {
      const auto evictions = counters.evictions;
      pool.trim();
      ASSERT_EQ(pool.counters().evictions, evictions) << "a wholly free slab was kept beyond the limit";
    }
  }
  for (const auto& block : blocks) pool.release(block, {});
  EXPECT_LE(pool.counters().idle, 40_KiB);
}

TEST_F(PoolCoreTest, RefusesAtTheHostLimitAndTakesUpAgainBelowIt) {
  auto& pool = make({.slab_size = 64_KiB, .host_limit = 100_KiB});
  const auto a = *pool.try_acquire((60_KiB).count);
  const auto b = *pool.try_acquire((36_KiB).count);  // a shared slab of 64 KiB would not fit any more
  EXPECT_EQ(pool.counters().locked, 100_KiB);
  EXPECT_EQ(pool.try_acquire((40_KiB).count), std::nullopt);
  EXPECT_EQ(pool.counters().refusals, 1);
  const auto copy = running_copy();
  pool.release(a, FakeFence(copy));
  EXPECT_EQ(pool.try_acquire((60_KiB).count), std::nullopt) << "in flight";
  *copy = true;
  const auto c = pool.try_acquire((60_KiB).count);
  ASSERT_TRUE(c);
  pool.release(b, {});
  pool.release(*c, {});
}

TEST_F(PoolCoreTest, GivesIdleSlabsBackToStayBelowTheHostLimit) {
  auto& pool = make({.slab_size = 4_KiB, .host_limit = 64_KiB});
  const auto a = *pool.try_acquire((16_KiB).count);
  const auto b = *pool.try_acquire((24_KiB).count);
  pool.release(a, {});
  const auto evictions = pool.counters().evictions;
  EXPECT_EQ(pool.try_acquire((48_KiB).count), std::nullopt);
  EXPECT_EQ(pool.counters().evictions, evictions) << "nothing is given back when that would not be enough";
  const auto c = *pool.try_acquire((40_KiB).count);
  EXPECT_EQ(pool.counters().evictions, evictions + 1);
  EXPECT_EQ(pool.counters().locked, 64_KiB);
  pool.release(b, {});
  pool.release(c, {});
}

TEST_F(PoolCoreTest, AHostLimitOfZeroMeansZero) {
  auto& pool = make({.host_limit = 0_B});
  EXPECT_EQ(pool.try_acquire(0), std::nullopt);
  EXPECT_EQ(pool.try_acquire(1), std::nullopt);
  EXPECT_TRUE(log_.allocated.empty());
}

TEST_F(PoolCoreTest, ADoubleReleaseIsAnErrorEvenWhenThePlaceHasANewHolder) {
  auto& pool = make({.slab_size = 4_KiB});
  const auto first = *pool.try_acquire(1);
  pool.release(first, {});
  EXPECT_THAT([&] { pool.release(first, {}); }, ThrowsMessage<InternalError>(HasSubstr("released twice")));
  const auto second = *pool.try_acquire(1);
  ASSERT_EQ(second.data, first.data);
  EXPECT_THROW(pool.release(first, {}), InternalError);
  pool.release(second, {});
}

TEST_F(PoolCoreTest, AForeignReleaseIsAnError) {
  auto& pool = make({});
  SourceLog other_log;
  Pool other({}, std::make_unique<FakeSource>(other_log));
  const auto mine = *pool.try_acquire(1);
  const auto foreign = *other.try_acquire(1);
  EXPECT_THROW(pool.release(foreign, {}), InternalError);
  EXPECT_THROW(pool.release({}, {}), InternalError);
  pool.release(mine, {});
  other.release(foreign, {});
}

TEST_F(PoolCoreTest, TriesOnceMoreWithLessWhenTheHostIsShortOfMemory) {
  auto& pool = make({.slab_size = 1_MiB});
  log_.refuse = 1;
  const auto block = *pool.try_acquire(5000);
  EXPECT_EQ(pool.counters().locked, 8_KiB);
  log_.refuse = 2;
  EXPECT_EQ(pool.try_acquire(5000), std::nullopt);
  EXPECT_EQ(pool.counters().locked, 8_KiB);
  EXPECT_EQ(pool.counters().refusals, 1);
  pool.release(block, {});
}

TEST_F(PoolCoreTest, StaysAsItWasWhenTheSourceThrows) {
  auto& pool = make({});
  log_.throws = true;
  EXPECT_THROW((void)pool.try_acquire(1), std::runtime_error);
  EXPECT_EQ(pool.counters().locked, 0_B);
  log_.throws = false;
  pool.release(*pool.try_acquire(1), {});
}

// The block is then carved out of the place that has become free, and nothing out of the new slab.
TEST_F(PoolCoreTest, GivesBackASlabThatWasNotNeededAfterAll) {
  auto& pool = make({.slab_size = 256_KiB, .cache_limit = 1_MiB});
  const auto first = pool.try_acquire((200_KiB).count);
  log_.meanwhile = [&] { pool.release(*first, {}); };
  const auto second = pool.try_acquire((100_KiB).count);
  EXPECT_EQ(log_.allocated.size(), 2u);
  pool.trim();
  EXPECT_EQ(pool.counters().locked, 256_KiB);
  pool.release(*second, {});
  pool.trim();
  EXPECT_EQ(pool.counters().locked, 0_B);
}

TEST_F(PoolCoreTest, KeepsBlocksInFlightWhenADeviceErrorSurfaces) {
  auto& pool = make({.slab_size = 4_KiB});
  const auto block = *pool.try_acquire(1);
  FakeFence::throws = true;
  EXPECT_THROW(pool.release(block, FakeFence(running_copy())), std::runtime_error);
  EXPECT_EQ(pool.counters().in_flight, 4_KiB);  // the report itself does not fail
  EXPECT_EQ(pool.counters().in_use, 0_B);
  FakeFence::throws = false;
}

TEST_F(PoolCoreTest, WaitsForCopiesInFlightBeforeItFreesTheirMemory) {
  auto& pool = make({});
  const auto copy = running_copy();
  pool.release(*pool.try_acquire(1), FakeFence(copy));
  const int waits = FakeFence::waits;
  pool_.reset();
  EXPECT_TRUE(*copy);
  EXPECT_EQ(FakeFence::waits, waits + 1);
}

TEST_F(PoolCoreTest, CountsBeyondTwoGibibytes) {
  log_.memory = false;
  auto& pool = make({.slab_size = 1_GiB, .cache_limit = 64_GiB, .host_limit = 64_GiB});
  const auto a = *pool.try_acquire((5_GiB).count + 1);
  const auto b = *pool.try_acquire((3_GiB).count);
  EXPECT_EQ(pool.counters().requested, 8_GiB + 1_B);
  EXPECT_EQ(pool.counters().locked, 8_GiB + 4_KiB);
  pool.release(a, {});
  pool.release(b, {});
  EXPECT_EQ(pool.counters().idle, 8_GiB + 4_KiB);
}

TEST_F(PoolCoreTest, RefusesOptionsOutOfRange) {
  const auto expect_error = [this](PoolOptions options, const char* text) {
    EXPECT_THAT([&] { make(options); }, ThrowsMessage<UserError>(HasSubstr(text)));
    pool_.reset();
  };
  expect_error({.slab_size = 0_B}, "[memory.slab_size] expected 1 to");
  expect_error({.cache_limit = Bytes(-1)},
               "[memory.host_cache_limit] expected 0 to 1152921504606846976 bytes; found -1");
  expect_error({.host_limit = Bytes(-5)}, "host_limit");
  expect_error({.cache_limit = Bytes(INT64_MAX)}, "host_cache_limit");
}

// Each thread fills its blocks with its own byte and finds it there until their copies are done: no block has two
// holders, and none comes back before its fence.
TEST_F(PoolCoreTest, ThreadsNeverShareABlock) {
  struct Copying {
    std::shared_ptr<std::atomic<bool>> copy;
    std::span<std::byte> bytes;
  };
  auto& pool = make({.slab_size = 32_KiB, .cache_limit = 64_KiB, .host_limit = 1_MiB});
  std::atomic<int> corrupted = 0;
  const auto work = [&](int id) {
    std::mt19937 random(id);
    std::deque<Copying> copying;
    const auto finish_oldest = [&] {
      const auto& [copy, bytes] = copying.front();
      for (size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) corrupted += bytes[at] != std::byte(id);
      *copy = true;
      copying.pop_front();
    };
    for (int i = 0; i < 3000; ++i) {
      const auto size = 1 + static_cast<int64_t>(random() % 20000);
      if (const auto block = pool.try_acquire(size)) {
        std::memset(block->data, id, size);
        copying.push_back({running_copy(), {block->data, static_cast<size_t>(size)}});
        pool.release(*block, FakeFence(copying.back().copy));
      }
      while (copying.size() > random() % 5) finish_oldest();
      if (i % 100 == 0) (void)pool.counters();
    }
    while (!copying.empty()) finish_oldest();
  };
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) threads.emplace_back(work, id);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(corrupted, 0);
  EXPECT_LE(pool.counters().locked_peak, 1_MiB);
}

}  // namespace
}  // namespace neap::memory
