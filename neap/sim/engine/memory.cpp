// torch-free
#include "neap/sim/engine/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "neap/base/bytes.h"
#include "neap/base/error.h"

namespace neap::sim {
namespace {

constexpr unsigned char kPoison = 0xFF;  // all bits set is NaN in every float type torch has

// Whole ones that hold so many bytes, one at least.
std::size_t multiples(std::size_t bytes, std::size_t of) { return (std::max<std::size_t>(bytes, 1) + of - 1) / of; }

}  // namespace

std::string MemoryShortage::text() const {
  const std::string where = device == kHostDevice ? "page-locked host memory" : internal::concat("sim:", device);
  return internal::concat(where, " is out of memory: asked ", Bytes(asked), ", free ", Bytes(free), ", in use ",
                          Bytes(current), ", peak ", Bytes(peak), ", capacity ", Bytes(capacity));
}

void MemoryBook::charge(int64_t charged, int64_t requested) {
  stats_.current += charged;
  stats_.requested += requested;
  stats_.peak = std::max(stats_.peak, stats_.current);
  stats_.requested_peak = std::max(stats_.requested_peak, stats_.requested);
  ++stats_.live_blocks;
  ++stats_.allocations;
}

void MemoryBook::release(int64_t charged, int64_t requested) {
  stats_.current -= charged;
  stats_.requested -= requested;
  --stats_.live_blocks;
  ++stats_.frees;
}

void MemoryBook::reset_peak() {
  stats_.peak = stats_.current;
  stats_.requested_peak = stats_.requested;
}

MemoryShortage MemoryBook::refuse(int device, int64_t asked) {
  ++stats_.out_of_memory;
  return {.device = device,
          .asked = asked,
          .free = std::max<int64_t>(stats_.capacity - stats_.current, 0),
          .current = stats_.current,
          .peak = stats_.peak,
          .capacity = stats_.capacity};
}

Block* BlockStore::make(int device, std::size_t bytes, int64_t charged, Stream* home) {
  collect_retired();
  Block* block = nullptr;
  if (resting_.size() > kQuarantine) {
    block = resting_.front();
    resting_.pop_front();
  } else {
    all_.push_back(std::make_unique<Block>());
    block = all_.back().get();
  }
  block->id_ = next_id_++;
  block->device_ = device;
  block->bytes_ = bytes;
  block->charged_ = charged;
  block->home_ = home;
  block->live_ = true;
  block->poison_ = false;
  block->data_ = nullptr;
  block->drop_ = nullptr;
  block->accesses_.clear();
  block->recorded_.clear();
  block->references_.store(1, std::memory_order_relaxed);
  return block;
}

BlockStore::~BlockStore() {
  collect_retired();
  for (const auto& spare : spare_)
    for (void* memory : spare) std::free(memory);
}

#if defined(__SANITIZE_ADDRESS__)
bool BlockStore::is_small(const Block& /*block*/) { return false; }  // a sanitizer sees only what is freed for real
#else
bool BlockStore::is_small(const Block& block) { return block.bytes_ <= kSmall; }
#endif

std::vector<void*>& BlockStore::spare_like(const Block& block) { return spare_[multiples(block.bytes_, kAlignment)]; }

void BlockStore::keep_spare(const Block& block) {
  std::vector<void*>& spare = spare_like(block);
  if (spare.size() < kMostSpare) return spare.push_back(block.data_);
  std::free(block.data_);
}

void BlockStore::discard(Block* block) {
  block->live_ = false;
  resting_.push_back(block);
}

void BlockStore::provide(Block* block, bool poison) {
  if (is_small(*block) && !spare_like(*block).empty()) {
    block->data_ = spare_like(*block).back();
    spare_like(*block).pop_back();
  } else {
    block->data_ = std::aligned_alloc(kAlignment, multiples(block->bytes_, kAlignment) * kAlignment);
    if (block->data_ == nullptr) throw std::bad_alloc();
  }
  block->poison_ = poison;
  if (poison) std::memset(block->data_, kPoison, block->bytes_);
}

void BlockStore::release(Block* block) noexcept {
  if (block->references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (block->poison_) std::memset(block->data_, kPoison, block->bytes_);
  if (block->drop_ != nullptr) {
    block->drop_(block->argument_);
  } else if (!is_small(*block)) {
    std::free(block->data_);
  }
  block->next_ = retired_.load(std::memory_order_relaxed);
  while (!retired_.compare_exchange_weak(block->next_, block, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

void BlockStore::collect_retired() {
  if (retired_.load(std::memory_order_relaxed) == nullptr) return;
  for (Block* block = retired_.exchange(nullptr, std::memory_order_acquire); block != nullptr;) {
    Block* next = block->next_;
    resting_.push_back(block);
    if (block->drop_ == nullptr && is_small(*block)) keep_spare(*block);
    block = next;
  }
}

}  // namespace neap::sim
