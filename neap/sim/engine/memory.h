// torch-free
// Blocks of simulated device memory and of page-locked host memory, and the book that counts them.
//
// The Engine owns every Block and guards what it holds; outside, a Block* is a handle. Handles are not reused for the
// next few hundred allocations, so that a use after free is recognised instead of hitting a stranger.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "neap/sim/engine/access_log.h"
#include "neap/sim/engine/types.h"

namespace neap::sim {

// Why an allocation failed.
struct MemoryShortage {
  int device = 0;  // -1: page-locked host memory
  int64_t asked = 0;
  int64_t free = 0;
  int64_t current = 0;
  int64_t peak = 0;
  int64_t capacity = 0;

  // "sim:0 is out of memory: asked 2.00 MiB, free …, in use …, peak …, capacity …"
  std::string text() const;
};

inline constexpr int kHostDevice = -1;

class Block {
 public:
  // Fixed for the life of the allocation.
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  uint64_t id() const { return id_; }
  int device() const { return device_; }  // kHostDevice: page-locked
  bool pinned() const { return device_ == kHostDevice; }

 private:
  friend class Engine;
  friend class BlockStore;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int64_t charged_ = 0;
  uint64_t id_ = 0;
  int device_ = kHostDevice;
  bool live_ = false;              // not freed yet
  bool poison_ = false;            // fill the memory when it goes back
  Stream* home_ = nullptr;         // null: page-locked
  void (*drop_)(void*) = nullptr;  // null: the memory is ours, from aligned_alloc
  void* argument_ = nullptr;
  AccessLog accesses_;
  std::vector<Stream*> recorded_;
  std::atomic<int> references_{0};  // one while live, and one for each queued copy
  Block* next_ = nullptr;           // of the retired list, or of the list of live device blocks
  Block* previous_ = nullptr;
};

// Counts of one device, or of page-locked memory. Guarded by the Engine.
class MemoryBook {
 public:
  void set_capacity(int64_t capacity) { stats_.capacity = capacity; }
  bool fits(int64_t charge) const { return stats_.capacity == 0 || charge <= stats_.capacity - stats_.current; }
  void charge(int64_t charged, int64_t requested);
  void release(int64_t charged, int64_t requested);
  void reset_peak();
  // Counts the failure and describes it.
  MemoryShortage refuse(int device, int64_t asked);
  const MemoryStats& stats() const { return stats_; }

 private:
  MemoryStats stats_;
};

// Makes and recycles Blocks and holds the memory behind them.
class BlockStore {
 public:
  BlockStore() = default;
  ~BlockStore();
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  // A live block without memory. The caller's lock guards this call.
  Block* make(int device, std::size_t bytes, int64_t charged, Stream* home);
  // Gives the handle back at once, for an allocation that came to nothing. Under the same lock.
  void discard(Block* block);
  // Own memory for the block; throws std::bad_alloc. Under the same lock.
  void provide(Block* block, bool poison);
  // A queued copy keeps the memory. Any thread.
  static void retain(Block* block) { block->references_.fetch_add(1, std::memory_order_relaxed); }
  // Gives the memory back with the last reference. Any thread, without the lock: `drop` may run foreign code.
  void release(Block* block) noexcept;

 private:
  static constexpr std::size_t kQuarantine = 512;
  static constexpr std::size_t kAlignment = 64;  // what torch's CPU kernels expect of their own allocator
  static constexpr std::size_t kSmall = 1024;
  static constexpr std::size_t kMostSpare = 256;  // of one size

  static bool is_small(const Block& block);
  std::vector<void*>& spare_like(const Block& block);
  void keep_spare(const Block& block);
  void collect_retired();

  uint64_t next_id_ = 1;
  std::vector<std::unique_ptr<Block>> all_;
  std::deque<Block*> resting_;  // longest first
  std::atomic<Block*> retired_{nullptr};
  // Memory of small blocks that has come back, by whole multiples of kAlignment: aligned memory is dear to ask for.
  std::array<std::vector<void*>, kSmall / kAlignment + 1> spare_;
};

}  // namespace neap::sim
