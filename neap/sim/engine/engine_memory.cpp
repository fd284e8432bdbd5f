// torch-free
#include <algorithm>
#include <cstring>
#include <utility>

#include "neap/base/error.h"
#include "neap/sim/engine/engine.h"
#include "neap/trace/recorder.h"

namespace neap::sim {
namespace {

int64_t rounded(std::size_t bytes) {
  return static_cast<int64_t>((bytes + kGranularity - 1) / kGranularity * kGranularity);
}

bool holds(const Block& block, uintptr_t address) {
  const auto begin = reinterpret_cast<uintptr_t>(block.data());
  return begin <= address && address < begin + std::max<std::size_t>(block.bytes(), 1);
}

}  // namespace

// ---- allocation
// -------------------------------------------------------------------------------------------------------

Block* Engine::allocate(Stream* on, std::size_t bytes, MemoryShortage* shortage) {
  return charge(on, bytes, nullptr, "allocation", shortage);
}

Block* Engine::adopt(Stream* on, void* data, std::size_t bytes, void (*drop)(void*), void* argument,
                     MemoryShortage* shortage) {
  NEAP_ASSERT(data != nullptr && drop != nullptr);
  Block* block = charge(on, bytes, data, "kernel result", shortage);
  if (block != nullptr) {
    block->drop_ = drop;
    block->argument_ = argument;
  }
  return block;
}

Block* Engine::charge(Stream* on, std::size_t bytes, void* adopted, const char* what, MemoryShortage* shortage) {
  settle_late_frees(on->device());
  for (bool waited = false;; waited = true) {
    {
      MutexLock lock(mutex_);
      if (Block* block = try_charge(on, bytes, adopted, what)) return block;
      if (waited) {
        *shortage = device_at(on->device()).memory.refuse(on->device(), static_cast<int64_t>(bytes));
        return nullptr;
      }
    }
    // Blocks that only wait for recorded streams still count. Better to hold the host up than to fail.
    wait_for_late_frees(on->device());
  }
}

Block* Engine::try_charge(Stream* on, std::size_t bytes, void* adopted, const char* what) {
  Device& device = device_at(on->device());
  const int64_t charged = rounded(bytes);
  if (!device.memory.fits(charged)) return nullptr;
  Block* block = blocks_.make(on->device(), bytes, charged, on);
  if (adopted != nullptr) {
    block->data_ = adopted;
    ++device.totals.adopted;
  } else {
    try {
      blocks_.provide(block, config_.poison);
    } catch (...) {
      blocks_.discard(block);
      throw;
    }
  }
  device.memory.charge(charged, static_cast<int64_t>(bytes));
  block->next_ = device.live;
  if (device.live != nullptr) device.live->previous_ = block;
  device.live = block;
  trace_memory(on->device());
  if (config_.hazard_check) {
    // The memory may be a reused block of its home stream, so others must be ordered after this point before they touch
    // it. That makes it a write on the home stream.
    open(on, 0);
    check_reuse(on);
    block->accesses_.add({on->index_, true, on->number_, 0, bytes, what}, on->seen_);
  }
  return block;
}

Block* Engine::allocate_pinned(std::size_t bytes, MemoryShortage* shortage) {
  MutexLock lock(mutex_);
  const auto charged = static_cast<int64_t>(bytes);
  if (!pinned_.fits(charged)) {
    *shortage = pinned_.refuse(kHostDevice, charged);
    return nullptr;
  }
  Block* block = blocks_.make(kHostDevice, bytes, charged, nullptr);
  try {
    blocks_.provide(block, config_.poison);
    pinned_blocks_[reinterpret_cast<uintptr_t>(block->data())] = block;
  } catch (...) {
    blocks_.discard(block);
    throw;
  }
  pinned_.charge(charged, charged);
  return block;
}

// ---- free
// -------------------------------------------------------------------------------------------------------------

void Engine::free(Block* block) noexcept {
  bool now = false;
  {
    MutexLock lock(mutex_);
    if (!block->live_) {
      report(*block, "is freed twice");
      return;
    }
    block->live_ = false;
    now = uncharge(block);
  }
  if (now) blocks_.release(block);
}

// False when recorded streams may still use the block, so that its bytes stay charged for now.
bool Engine::uncharge(Block* block) {
  if (block->pinned()) {
    // Queued copies hold their blocks, as torch's own page-locked allocator holds them back by events: always right.
    pinned_blocks_.erase(reinterpret_cast<uintptr_t>(block->data()));
    pinned_.release(block->charged_, block->charged_);
    return true;
  }
  if (config_.hazard_check) check_free(block);
  LateFree late{block, {}};
  for (Stream* user : block->recorded_) {
    auto recording = make_recording(user);
    push(user, Task{.record = recording});
    late.until.push_back(std::move(recording));
  }
  if (!late.until.empty()) {
    late_frees_.push_back(std::move(late));
    any_late_free_.store(true, std::memory_order_release);
    return false;
  }
  give_back(block);
  return true;
}

void Engine::give_back(Block* block) {
  Device& device = device_at(block->device());
  if (block->next_ != nullptr) block->next_->previous_ = block->previous_;
  (block->previous_ != nullptr ? block->previous_->next_ : device.live) = block->next_;
  block->next_ = block->previous_ = nullptr;
  device.memory.release(block->charged_, static_cast<int64_t>(block->bytes()));
  trace_memory(block->device());
}

// `behind` becomes a recording that keeps the block although the clock has passed it.
bool Engine::over(const LateFree& late, int device, std::shared_ptr<const Recording>& behind) {
  for (const auto& recording : late.until) {
    if (!reached(*recording)) return false;
    if (recording->done()) continue;
    if (recording->device == device) behind = recording;
    return false;
  }
  return true;
}

void Engine::settle_late_frees(int device) {
  while (any_late_free_.load(std::memory_order_acquire)) {
    std::vector<LateFree> settled;
    std::shared_ptr<const Recording> behind;  // over on the clock, but not really
    {
      MutexLock lock(mutex_);
      std::vector<LateFree> waiting;
      for (LateFree& late : late_frees_) (over(late, device, behind) ? settled : waiting).push_back(std::move(late));
      late_frees_ = std::move(waiting);
      any_late_free_.store(!late_frees_.empty(), std::memory_order_release);
      for (const LateFree& late : settled) give_back(late.block);
    }
    for (const LateFree& late : settled) blocks_.release(late.block);
    if (behind == nullptr || any_paused()) return;
    wait_for(*behind);
  }
}

bool Engine::wait_for_late_frees(int device) {
  std::vector<std::shared_ptr<const Recording>> recordings;
  {
    MutexLock lock(mutex_);
    for (const LateFree& late : late_frees_)
      if (late.block->device() == device) recordings.insert(recordings.end(), late.until.begin(), late.until.end());
    if (recordings.empty()) return false;
    ++device_at(device).totals.memory_waits;
  }
  for (const auto& recording : recordings) {
    wait_for(*recording);
    MutexLock lock(mutex_);
    host_waits(device, recording->time, "wait for memory");
  }
  settle_late_frees(device);
  return true;
}

void Engine::record_stream(Block* block, Stream* user) {
  MutexLock lock(mutex_);
  if (block->pinned() || user == block->home_) return;
  std::vector<Stream*>& recorded = block->recorded_;
  if (std::find(recorded.begin(), recorded.end(), user) == recorded.end()) recorded.push_back(user);
}

// ---- look-up
// ----------------------------------------------------------------------------------------------------------

const Block* Engine::find_block(const void* address) const {
  const auto where = reinterpret_cast<uintptr_t>(address);
  auto after = pinned_blocks_.upper_bound(where);
  if (after != pinned_blocks_.begin() && holds(*std::prev(after)->second, where)) return std::prev(after)->second;
  for (const Device& device : devices_)
    for (const Block* block = device.live; block != nullptr; block = block->next_)
      if (holds(*block, where)) return block;
  return nullptr;
}

Block* Engine::find_pinned(const void* address) const {
  const auto where = reinterpret_cast<uintptr_t>(address);
  MutexLock lock(mutex_);
  auto after = pinned_blocks_.upper_bound(where);
  if (after == pinned_blocks_.begin() || !holds(*std::prev(after)->second, where)) return nullptr;
  return std::prev(after)->second;
}

int Engine::find_device(const void* address) const {
  MutexLock lock(mutex_);
  const Block* block = find_block(address);
  return block != nullptr ? block->device() : kHostDevice;
}

void Engine::trace_memory(int device) {
  if (recorder_ == nullptr) return;
  recorder_->counter(internal::concat("sim:", device, "/memory"), "bytes in use", now_ns(device),
                     static_cast<double>(device_at(device).memory.stats().current));
}

}  // namespace neap::sim
