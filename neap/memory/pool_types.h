// torch-free
// The words of the host pool: its options, its counters, a block, and where slabs come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "neap/base/bytes.h"

namespace neap::memory {

// Blocks and slabs are whole multiples of this, so a block never shares a page with another.
inline constexpr int64_t kGranularity = 4096;

struct PoolOptions {
  // Smaller requests share slabs of this size; a larger one gets a slab of its own size.
  Bytes slab_size{int64_t{64} << 20};
  // Idle bytes the pool may keep for reuse. Beyond it, slabs that are wholly free go back, least recently used first.
  Bytes cache_limit{int64_t{4} << 30};
  // All bytes the pool may hold. None: no limit. Zero: nothing.
  std::optional<Bytes> host_limit = std::nullopt;
};

// A snapshot. locked = in use + in flight + idle; sums are of whole blocks, but for `requested`, which is as asked.
struct PoolCounters {
  Bytes requested;  // asked for by the buffers that are held now
  Bytes in_use;     // their blocks
  Bytes in_flight;  // released, but a copy may still touch them
  Bytes idle;       // free for reuse
  Bytes locked;     // all slabs
  Bytes locked_peak;
  Bytes requested_peak;
  int64_t acquires = 0;  // requests that got a block
  int64_t hits = 0;      // of these, without a new slab
  int64_t refusals = 0;  // requests that got none: host limit, or no host memory
  int64_t slab_allocations = 0;
  int64_t evictions = 0;       // slabs given back
  int64_t pageable_slabs = 0;  // of the allocations, those that could not be pinned
};

// The memory of one slab; freed by its destructor.
class SlabMemory {
 public:
  virtual ~SlabMemory() = default;
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  [[nodiscard]] virtual bool pinned() const noexcept = 0;
};

// Where a pool gets its slabs. Called without the pool's lock, from any thread.
class SlabSource {
 public:
  virtual ~SlabSource() = default;
  // The bytes that a slab for `bytes` takes anyway; the pool uses them all. Not less than `bytes`, same for equal
  // input.
  [[nodiscard]] virtual int64_t round_up(int64_t bytes) const { return bytes; }
  // Null when there is no memory; the pool then gives idle slabs back and asks once more.
  [[nodiscard]] virtual std::unique_ptr<SlabMemory> allocate(int64_t bytes) = 0;
};

// A piece of a slab, given out once. A plain handle: whoever acquired it releases it once.
struct PoolBlock {
  std::byte* data = nullptr;
  SlabMemory* memory = nullptr;
  int64_t requested = 0;
  uint32_t slot = 0;    // where the pool notes it
  uint64_t serial = 0;  // of this acquisition, unique in the process: a stale or foreign handle is recognised

  [[nodiscard]] bool is_null() const noexcept { return memory == nullptr; }
};

}  // namespace neap::memory
