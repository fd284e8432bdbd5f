// The pool's promise of a steady state without heap allocations, checked by counting them.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "neap/memory/pool_core.h"

namespace {
std::atomic<int64_t> g_allocations = 0;
}

// Not inlined: GCC would see free() meet operator new's memory and warn, not knowing that both are ours.

[[gnu::noinline]] void* operator new(size_t size) {
  ++g_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t size, std::align_val_t alignment) {
  ++g_allocations;
  const auto align = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(align, (size + align - 1) / align * align)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace neap::memory {
namespace {

class Slab final : public SlabMemory {
 public:
  explicit Slab(int64_t size) : bytes_(size) {}
  std::byte* data() const noexcept override { return const_cast<std::byte*>(bytes_.data()); }
  bool pinned() const noexcept override { return true; }

 private:
  std::vector<std::byte> bytes_;
};

struct Source final : SlabSource {
  std::unique_ptr<SlabMemory> allocate(int64_t bytes) override { return std::make_unique<Slab>(bytes); }
};

// Passes one step after it was made.
struct StepFence {
  static inline int64_t step = 0;
  int64_t made = -1;
  bool is_null() const { return made < 0; }
  bool query() const { return made < step; }
  void synchronize() const {}
};

TEST(HostPoolHeap, ASteadyRunAllocatesNothing) {
  PoolCore<StepFence> pool({.slab_size = Bytes(1 << 20)}, std::make_unique<Source>());
  std::vector<PoolBlock> blocks;
  blocks.reserve(64);
  int64_t after_warm_up = 0;
  for (StepFence::step = 0; StepFence::step < 20; ++StepFence::step) {
    if (StepFence::step == 3) after_warm_up = g_allocations;
    for (int64_t i = 0; i < 64; ++i) blocks.push_back(*pool.try_acquire(1 + i * 37'000 % 300'000));
    for (; !blocks.empty(); blocks.pop_back()) pool.release(blocks.back(), {StepFence::step});
  }
  EXPECT_GT(after_warm_up, 0);
  EXPECT_EQ(g_allocations, after_warm_up);
}

}  // namespace
}  // namespace neap::memory
