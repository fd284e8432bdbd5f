// The pool on torch's memory, without an accelerator: buffers, tensors, and where slabs come from.
#include "neap/memory/host_pool.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "neap/memory/slab_source.h"

namespace neap::memory {
namespace {

using namespace neap::literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(HostBuffer, ShowsItsBytesAsATensor) {
  HostPool pool({.slab_size = 1_MiB});
  auto first = pool.acquire(100_B);
  auto second = pool.acquire(10'000_B);
  const auto tensor = second.tensor();
  EXPECT_EQ(tensor.scalar_type(), at::kByte);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({10'000}));
  EXPECT_EQ(tensor.data_ptr(), second.data());
  EXPECT_TRUE(tensor.is_cpu());
  std::memset(first.data(), 1, 100);
  std::memset(second.data(), 7, 10'000);
  EXPECT_TRUE(at::equal(tensor, at::full({10'000}, 7, at::kByte)));
  EXPECT_EQ(second.read().size(), 10'000);
  EXPECT_EQ(second.read()[9'999], std::byte(7));
}

TEST(HostBuffer, GivesItsBytesBackOnceWhicheverWayItGoes) {
  HostPool pool({});
  auto first = pool.acquire(1_MiB);
  auto second = std::move(first);
  EXPECT_TRUE(first.is_null());
  EXPECT_EQ(pool.counters().requested, 1_MiB);
  second = pool.acquire(2_MiB);  // the former bytes go back
  EXPECT_EQ(pool.counters().requested, 2_MiB);
  second.release();
  EXPECT_EQ(pool.counters().requested, 0_B);
  EXPECT_THAT([&] { second.release(); }, ThrowsMessage<InternalError>(HasSubstr("released twice")));
  EXPECT_THROW(second.release_after({}), InternalError);
  EXPECT_THROW(first.tensor(), InternalError);
  EXPECT_THROW((void)first.read(), InternalError);
}

TEST(HostBuffer, OutlivesItsPool) {
  std::optional<HostPool> pool(std::in_place, HostPool::Options{});
  auto buffer = pool->acquire(100_B);
  pool.reset();
  std::memset(buffer.data(), 3, 100);
  EXPECT_EQ(buffer.read()[99], std::byte(3));
}

TEST(HostBuffer, HoldsZeroBytes) {
  HostPool pool({});
  const auto buffer = pool.acquire(0_B);
  EXPECT_FALSE(buffer.is_null());
  EXPECT_EQ(buffer.tensor().numel(), 0);
}

TEST(HostPool, SaysWhyItHasNoMemory) {
  HostPool pool({.host_limit = 1_MiB});
  const auto held = pool.acquire(600_KiB);
  EXPECT_EQ(pool.try_acquire(600_KiB).has_value(), false);
  EXPECT_THAT([&] { (void)pool.acquire(600_KiB); },
              ThrowsMessage<OutOfMemory>(testing::AllOf(HasSubstr("600.00 KiB"), HasSubstr("the limit is 1.00 MiB"),
                                                        HasSubstr("raise host_limit"))));
}

TEST(HostPool, RefusesOptionsOutOfRange) {
  EXPECT_THAT([] { HostPool pool({.slab_size = 0_B}); }, ThrowsMessage<UserError>(HasSubstr("slab_size")));
  EXPECT_THAT([] { HostPool pool({.host_limit = Bytes(-1)}); }, ThrowsMessage<UserError>(HasSubstr("host_limit")));
}

TEST(HostPool, IsSharedBySeveralEngines) {
  const auto pool = std::make_shared<HostPool>(HostPool::Options{.slab_size = 256_KiB, .cache_limit = 1_MiB});
  std::vector<std::thread> engines;
  std::atomic<int> wrong = 0;
  for (int id = 0; id < 3; ++id) {
    engines.emplace_back([&, id] {
      for (int i = 0; i < 500; ++i) {
        const auto buffer = pool->acquire(Bytes(1 + i * 97 % 50'000));
        std::memset(buffer.data(), id, buffer.size().count);
        wrong += buffer.read().back() != std::byte(id);
      }
    });
  }
  for (auto& engine : engines) engine.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool->counters().requested, 0_B);
  pool->trim();
  EXPECT_EQ(pool->counters().locked, 0_B);
}

// A stand-in for torch's pinned allocator: ordinary memory, or none.
class FakeHostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (fails) TORCH_CHECK(false, "out of page locks");
    asked.push_back(static_cast<int64_t>(bytes));
    active += rounds ? std::bit_ceil(bytes) : bytes;
    auto* pages = new std::vector<char>(bytes);
    return {pages->data(), pages, [](void* context) { delete static_cast<std::vector<char>*>(context); }, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override { ++emptied; }
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.active_bytes.current = static_cast<int64_t>(active);
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool fails = false, rounds = false;
  size_t active = 0;
  int emptied = 0;
  std::vector<int64_t> asked;
};

// The functions of a backend that locks memory, recorded.
struct FakeLocker {
  static inline std::vector<std::string> calls;
  static inline bool fails = false;
  static HostRegister functions() {
    calls.clear();
    fails = false;
    return {.lock =
                [](void*, size_t bytes, unsigned flags) {
                  calls.push_back("lock " + std::to_string(bytes) + " flags " + std::to_string(flags));
                  return fails ? 2 : 0;
                },
            .unlock = [](void*) { return calls.push_back("unlock"), 0; },
            .clear_error = [] { return calls.push_back("clear"), 2; }};
  }
};

class PinnedSourceTest : public testing::Test {
 protected:
  PinnedSourceTest()
      : former_(set_log_sink([this](LogLevel, const std::string& text) { warnings_.push_back(text); })) {}
  ~PinnedSourceTest() override { set_log_sink(former_); }

  const c10::Device device_{c10::kCPU};
  FakeHostAllocator allocator_;
  std::vector<std::string> warnings_;

 private:
  LogSink former_;
};

TEST_F(PinnedSourceTest, LocksExactlyWhatIsAskedWhereTheBackendCan) {
  {
    PinnedSource source(device_, FakeLocker::functions(), &allocator_);
    EXPECT_EQ(source.round_up((129_MiB).count), (129_MiB).count);
    const auto slab = source.allocate((129_MiB).count);
    EXPECT_TRUE(slab->pinned());
    std::memset(slab->data(), 1, 4096);
  }
  EXPECT_THAT(FakeLocker::calls, ElementsAre("lock 135266304 flags 1", "unlock"));
  EXPECT_THAT(allocator_.asked, testing::IsEmpty());
}

TEST_F(PinnedSourceTest, AsksTorchWhenTheBackendRefuses) {
  PinnedSource source(device_, FakeLocker::functions(), &allocator_);
  FakeLocker::fails = true;
  EXPECT_TRUE(source.allocate(8192)->pinned());
  EXPECT_THAT(FakeLocker::calls, ElementsAre("lock 8192 flags 1", "clear"));  // no error left for the next call to find
  EXPECT_THAT(allocator_.asked, ElementsAre(8192));
  EXPECT_THAT(warnings_, testing::IsEmpty());
}

TEST_F(PinnedSourceTest, KnowsWhenTorchRoundsUpToPowersOfTwo) {
  EXPECT_EQ(PinnedSource(device_, std::nullopt, &allocator_).round_up(5 << 20), 5 << 20);
  allocator_.rounds = true;
  EXPECT_EQ(PinnedSource(device_, std::nullopt, &allocator_).round_up(5 << 20), 8 << 20);
  EXPECT_EQ(PinnedSource(device_, FakeLocker::functions(), &allocator_).round_up(5 << 20), 5 << 20);
}

TEST_F(PinnedSourceTest, MakesTorchLetGoOfASlabThatIsFreed) {
  PinnedSource source(device_, std::nullopt, &allocator_);
  auto slab = source.allocate(8192);
  EXPECT_EQ(allocator_.emptied, 0);
  slab.reset();
  EXPECT_EQ(allocator_.emptied, 1);
}

TEST_F(PinnedSourceTest, FallsBackToPageableMemoryWithOneWarning) {
  allocator_.fails = true;
  PinnedSource source(device_, std::nullopt, &allocator_);
  for (int i = 0; i < 3; ++i) {
    const auto slab = source.allocate(8192);
    ASSERT_NE(slab, nullptr);
    EXPECT_FALSE(slab->pinned());
    std::memset(slab->data(), 1, 8192);
  }
  EXPECT_THAT(warnings_, ElementsAre(testing::AllOf(HasSubstr("8.00 KiB could not be had"), HasSubstr("page locks"),
                                                    HasSubstr("ulimit -l"))));
}

TEST_F(PinnedSourceTest, CountsPageableSlabsInThePool) {
  allocator_.fails = true;
  HostPool pool({.slab_size = 8_KiB}, std::make_unique<PinnedSource>(device_, std::nullopt, &allocator_));
  const auto a = pool.acquire(8_KiB);
  const auto b = pool.acquire(8_KiB);
  EXPECT_EQ(pool.counters().pageable_slabs, 2);
  EXPECT_EQ(warnings_.size(), 1);
}

TEST(HostPool, HasNoMemoryRatherThanAnErrorWhenTheHostIsOut) {
  struct ExhaustedSource final : SlabSource {
    std::unique_ptr<SlabMemory> allocate(int64_t) override { return nullptr; }
  };
  HostPool pool({}, std::make_unique<ExhaustedSource>());
  EXPECT_FALSE(pool.try_acquire(1_MiB).has_value());
  EXPECT_EQ(pool.counters().locked, 0_B);
  EXPECT_THAT([&] { (void)pool.acquire(1_MiB); }, ThrowsMessage<OutOfMemory>(HasSubstr("the host has no more")));
}

TEST(HostRegister, IsNotFoundForABackendWithoutOne) {
  EXPECT_FALSE(find_host_register(c10::kCPU).has_value());
  EXPECT_FALSE(find_host_register(c10::kPrivateUse1).has_value());
}

}  // namespace
}  // namespace neap::memory
