// torch-free
// The host pool without torch: which block goes where, when it may be reused, when slabs come and go.
//
// A block is held (by a buffer), in flight (released, its fence not passed) or idle. Fences are polled, never waited
// for: at each call those at the front of the queue, and all of them when no idle chunk fits. Slabs are allocated and
// freed without the lock, which is held for bookkeeping and polls only. Thread-safe.
//
// Fence: a movable handle with is_null(), query() and synchronize(), as device::Event. query() and the destructor run
// under the pool's lock, so they must not block, take Python's lock, or call the pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/base/mutex.h"
#include "neap/base/scope_exit.h"
#include "neap/memory/free_list.h"
#include "neap/memory/pool_types.h"

namespace neap::memory {

inline constexpr int64_t kMaxPoolBytes = int64_t{1} << 60;  // far beyond any host, far from overflow

// Whole granules; `bytes` of zero takes one, so that every buffer has an address of its own.
int64_t whole_granules(int64_t bytes);
void check_pool_options(const PoolOptions& options);
uint64_t next_block_serial();

template <class Fence>
class PoolCore {
 public:
  // UserError when an option is out of range.
  PoolCore(const PoolOptions& options, std::unique_ptr<SlabSource> source);
  PoolCore(const PoolCore&) = delete;
  PoolCore& operator=(const PoolCore&) = delete;
  // REQUIRES: no block is held. Waits for the blocks in flight.
  ~PoolCore();

  // Empty at the host limit or without host memory. What the source throws comes out; the pool stays as it was.
  [[nodiscard]] std::optional<PoolBlock> try_acquire(int64_t bytes);
  // InternalError for a block that is not held: released before, or of another pool.
  void release(const PoolBlock& block, Fence after);
  void trim();

  [[nodiscard]] PoolCounters counters();
  void reset_peaks();
  [[nodiscard]] const PoolOptions& options() const noexcept { return options_; }

 private:
  using Place = FreeList::Place;
  // Slabs on their way out; destroyed after the lock is let go, hence declared before it.
  using Dropped = std::vector<std::unique_ptr<SlabMemory>>;

  struct Slab {
    std::unique_ptr<SlabMemory> memory;
    int64_t size;
    uint64_t idle_since;  // on the pool's clock; 0 while blocks of it are held or in flight
  };
  struct Held {
    uint64_t serial = 0;  // 0: nobody's
    Place place{};
    int64_t size = 0;
    int64_t requested = 0;
  };
  struct InFlight {
    Place place;
    int64_t size;
    Fence fence;
    bool passed = false;
  };
  enum class Poll { kFront, kAll };
  // How many fences kFront asks: each takes a microsecond of the host's, and the first request of a step would
  // otherwise ask for all blocks of the step before while the device waits.
  static constexpr std::ptrdiff_t kFew = 8;
  enum class Appetite { kShared, kLeast };  // a slab with place for others, or just enough

  std::optional<PoolBlock> carve(int64_t size, int64_t requested) NEAP_REQUIRES(mutex_);
  std::optional<PoolBlock> grow(int64_t size, int64_t requested) NEAP_EXCLUDES(mutex_);
  std::optional<int64_t> reserve_slab(int64_t size, Appetite appetite) NEAP_EXCLUDES(mutex_);
  PoolBlock insert_slab(std::unique_ptr<SlabMemory> memory, int64_t slab_size, int64_t size, int64_t requested)
      NEAP_EXCLUDES(mutex_);
  void collect(Poll poll) NEAP_REQUIRES(mutex_);
  void evict_excess(Dropped& dropped) NEAP_REQUIRES(mutex_);
  bool evict_oldest(Dropped& dropped) NEAP_REQUIRES(mutex_);
  void mark_idle(int32_t id) NEAP_REQUIRES(mutex_);
  void mark_used(Slab& slab) NEAP_REQUIRES(mutex_);
  int64_t room() const NEAP_REQUIRES(mutex_);  // below the host limit

  const PoolOptions options_;
  const std::unique_ptr<SlabSource> source_;

  Mutex mutex_;
  FreeList free_ NEAP_GUARDED_BY(mutex_);
  std::map<int32_t, Slab> slabs_ NEAP_GUARDED_BY(mutex_);
  std::pmr::unsynchronized_pool_resource nodes_ NEAP_GUARDED_BY(mutex_);
  std::vector<Held> held_ NEAP_GUARDED_BY(mutex_);            // by slot
  std::vector<uint32_t> free_slots_ NEAP_GUARDED_BY(mutex_);  // has room for all of them
  std::vector<InFlight> in_flight_ NEAP_GUARDED_BY(mutex_);   // in order of release
  int32_t next_slab_ NEAP_GUARDED_BY(mutex_) = 0;
  std::pmr::map<uint64_t, int32_t> idle_slabs_ NEAP_GUARDED_BY(mutex_){&nodes_};  // idle_since → slab: oldest first
  int64_t idle_slab_bytes_ NEAP_GUARDED_BY(mutex_) = 0;
  uint64_t clock_ NEAP_GUARDED_BY(mutex_) = 0;
  // locked includes slabs that are being allocated right now; idle is not kept here but asked of the free list.
  PoolCounters counters_ NEAP_GUARDED_BY(mutex_);
};

template <class Fence>
PoolCore<Fence>::PoolCore(const PoolOptions& options, std::unique_ptr<SlabSource> source)
    : options_(options), source_(std::move(source)) {
  check_pool_options(options);
}

template <class Fence>
PoolCore<Fence>::~PoolCore() {
  for (auto& block : in_flight_) {
    try {
      block.fence.synchronize();
    } catch (const std::exception& error) {
      log_error("[memory] a copy could not be waited for before its host memory is freed: ", error.what());
    }
  }
}

template <class Fence>
std::optional<PoolBlock> PoolCore<Fence>::try_acquire(int64_t bytes) {
  const int64_t size = whole_granules(bytes);
  {
    Dropped dropped;
    MutexLock lock(mutex_);
    collect(Poll::kFront);
    auto block = carve(size, bytes);
    if (!block && free_.free_bytes() + counters_.in_flight.count >= size) {
      collect(Poll::kAll);
      block = carve(size, bytes);
    }
    evict_excess(dropped);
    if (block) {
      ++counters_.hits;
      return block;
    }
  }
  return grow(size, bytes);
}

template <class Fence>
std::optional<PoolBlock> PoolCore<Fence>::carve(int64_t size, int64_t requested) {
  if (free_slots_.empty()) {
    held_.emplace_back();
    free_slots_.reserve(held_.capacity());
    free_slots_.push_back(static_cast<uint32_t>(held_.size()) - 1);
  }
  const auto place = free_.allocate(size);
  if (!place) return std::nullopt;
  auto& slab = slabs_.at(place->slab);
  mark_used(slab);
  const PoolBlock block{slab.memory->data() + place->offset, slab.memory.get(), requested, free_slots_.back(),
                        next_block_serial()};
  free_slots_.pop_back();
  held_[block.slot] = {block.serial, *place, size, requested};
  ++counters_.acquires;
  counters_.requested += Bytes(requested);
  counters_.requested_peak = std::max(counters_.requested_peak, counters_.requested);
  counters_.in_use += Bytes(size);
  return block;
}

template <class Fence>
std::optional<PoolBlock> PoolCore<Fence>::grow(int64_t size, int64_t requested) {
  // The second try asks for the least, after every idle slab went back: the host itself may be short of memory.
  for (const auto appetite : {Appetite::kShared, Appetite::kLeast}) {
    const auto slab_size = reserve_slab(size, appetite);
    if (!slab_size) break;
    ScopeExit unreserve([&] {
      MutexLock lock(mutex_);
      counters_.locked -= Bytes(*slab_size);
    });
    if (auto memory = source_->allocate(*slab_size)) {
      unreserve.dismiss();
      return insert_slab(std::move(memory), *slab_size, size, requested);
    }
  }
  MutexLock lock(mutex_);
  ++counters_.refusals;
  return std::nullopt;
}

template <class Fence>
std::optional<int64_t> PoolCore<Fence>::reserve_slab(int64_t size, Appetite appetite) {
  const int64_t need = source_->round_up(size);
  Dropped dropped;
  MutexLock lock(mutex_);
  while (appetite == Appetite::kLeast && evict_oldest(dropped)) {
  }
  if (need > room() + idle_slab_bytes_) return std::nullopt;  // giving slabs back would not help: keep them
  while (need > room()) evict_oldest(dropped);

  int64_t chosen = need;
  if (appetite == Appetite::kShared) {
    // What a shared slab holds beyond this request is idle at once, so it counts against the cache limit.
    const int64_t shared = source_->round_up(std::min(options_.slab_size.count, room()) / kGranularity * kGranularity);
    if (shared > need && shared <= room() && shared - size <= options_.cache_limit.count - free_.free_bytes()) {
      chosen = shared;
    }
  }
  counters_.locked += Bytes(chosen);
  counters_.locked_peak = std::max(counters_.locked_peak, counters_.locked);
  return chosen;
}

template <class Fence>
PoolBlock PoolCore<Fence>::insert_slab(std::unique_ptr<SlabMemory> memory, int64_t slab_size, int64_t size,
                                       int64_t requested) {
  MutexLock lock(mutex_);
  ++counters_.slab_allocations;
  if (!memory->pinned()) ++counters_.pageable_slabs;
  const int32_t id = next_slab_++;
  slabs_.emplace(id, Slab{std::move(memory), slab_size, /*idle_since=*/0});
  free_.add_slab(id, slab_size);
  mark_idle(id);  // the block may go to a place that has become free meanwhile
  return *carve(size, requested);
}

template <class Fence>
void PoolCore<Fence>::release(const PoolBlock& block, Fence after) {
  Dropped dropped;
  MutexLock lock(mutex_);
  NEAP_ASSERT(block.serial != 0 && block.slot < held_.size() && held_[block.slot].serial == block.serial, "host block ",
              block.serial, " released twice, or to a pool it is not of");
  const auto [serial, place, size, requested] = held_[block.slot];
  in_flight_.push_back({place, size, std::move(after)});  // may throw, so it comes first
  held_[block.slot] = {};
  free_slots_.push_back(block.slot);
  counters_.requested -= Bytes(requested);
  counters_.in_use -= Bytes(size);
  counters_.in_flight += Bytes(size);
  collect(Poll::kFront);
  evict_excess(dropped);
}

template <class Fence>
void PoolCore<Fence>::collect(Poll poll) {
  // Asked first, acted on after: a fence that throws leaves everything in its place.
  auto end = in_flight_.begin();
  for (; end != in_flight_.end(); ++end) {
    if (poll == Poll::kFront && end - in_flight_.begin() == kFew) break;
    end->passed = end->passed || end->fence.query();
    if (!end->passed && poll == Poll::kFront) break;
  }
  const auto kept = std::remove_if(in_flight_.begin(), end, [this](const InFlight& block) NEAP_REQUIRES(mutex_) {
    if (!block.passed) return false;
    if (free_.release(block.place)) mark_idle(block.place.slab);
    counters_.in_flight -= Bytes(block.size);
    return true;
  });
  in_flight_.erase(kept, end);
}

template <class Fence>
void PoolCore<Fence>::evict_excess(Dropped& dropped) {
  while (free_.free_bytes() > options_.cache_limit.count && evict_oldest(dropped)) {
  }
}

template <class Fence>
bool PoolCore<Fence>::evict_oldest(Dropped& dropped) {
  if (idle_slabs_.empty()) return false;
  const int32_t id = idle_slabs_.begin()->second;
  auto& slab = slabs_.at(id);
  dropped.push_back(std::move(slab.memory));
  mark_used(slab);
  free_.remove_slab(id);
  counters_.locked -= Bytes(slab.size);
  ++counters_.evictions;
  slabs_.erase(id);
  return true;
}

template <class Fence>
void PoolCore<Fence>::mark_idle(int32_t id) {
  auto& slab = slabs_.at(id);
  slab.idle_since = ++clock_;
  idle_slabs_.emplace(slab.idle_since, id);
  idle_slab_bytes_ += slab.size;
}

template <class Fence>
void PoolCore<Fence>::mark_used(Slab& slab) {
  if (slab.idle_since == 0) return;
  idle_slabs_.erase(slab.idle_since);
  idle_slab_bytes_ -= slab.size;
  slab.idle_since = 0;
}

template <class Fence>
int64_t PoolCore<Fence>::room() const {
  return options_.host_limit.value_or(Bytes(kMaxPoolBytes)).count - counters_.locked.count;
}

template <class Fence>
void PoolCore<Fence>::trim() {
  Dropped dropped;
  MutexLock lock(mutex_);
  collect(Poll::kAll);
  while (evict_oldest(dropped)) {
  }
}

template <class Fence>
PoolCounters PoolCore<Fence>::counters() {
  Dropped dropped;
  MutexLock lock(mutex_);
  try {
    collect(Poll::kAll);
    evict_excess(dropped);
  } catch (const std::exception&) {
    // A report must not fail because a device did; the blocks stay in flight.
  }
  auto snapshot = counters_;
  snapshot.idle = Bytes(free_.free_bytes());
  return snapshot;
}

template <class Fence>
void PoolCore<Fence>::reset_peaks() {
  MutexLock lock(mutex_);
  counters_.locked_peak = counters_.locked;
  counters_.requested_peak = counters_.requested;
}

}  // namespace neap::memory
