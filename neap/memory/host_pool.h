// Host memory for what leaves the device: pinned slabs, allocated whole and carved into blocks.
//
// A block is given out again only after the event of the last copy that reads or writes it, without the host ever
// waiting for one; a steady run allocates nothing, neither slabs nor heap. Several engines may share a pool
// (std::shared_ptr); buffers keep what they need alive and may outlive it. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "neap/base/bytes.h"
#include "neap/device/copy.h"
#include "neap/device/event.h"
#include "neap/memory/pool_types.h"

namespace neap::memory {

template <class Fence>
class PoolCore;

// A piece of a pool's memory, owned by one holder. Movable only; not thread-safe itself.
//
// Every copy that reads or writes the bytes must be made known with set_pending(); then whichever way the buffer goes —
// plain destruction, an exception — its memory is reused only after that copy.
class HostBuffer {
 public:
  HostBuffer() noexcept;  // holds nothing
  HostBuffer(HostBuffer&&) noexcept;
  HostBuffer& operator=(HostBuffer&&) noexcept;
  ~HostBuffer();  // gives the bytes back: reusable at once, or after the pending event

  [[nodiscard]] bool is_null() const noexcept;
  [[nodiscard]] Bytes size() const noexcept;  // as asked

  // Where the bytes are. The address is stable. Does not wait for copies: see read().
  [[nodiscard]] std::byte* data() const noexcept;
  // A flat uint8 CPU tensor over the bytes, pinned in torch's eyes when the pool's memory is. It keeps the memory, not
  // the block: after the buffer is released others write to it. REQUIRES: not null.
  [[nodiscard]] at::Tensor tensor() const;
  // The same bytes for a copy, while the buffer is held.
  [[nodiscard]] device::ByteSpan span() const;

  // The end of the latest copy that touches the bytes. REQUIRES: not null; the event is ordered after the former
  // pending one (same stream, or its stream waited for it).
  void set_pending(device::Event event);
  // Null when no copy was made known. For `stream.wait(buffer.pending())`.
  [[nodiscard]] const device::Event& pending() const noexcept;
  // The bytes as the CPU may read them: blocks until the pending copy is done. REQUIRES: not null.
  [[nodiscard]] std::span<const std::byte> read() const;

  // Gives the bytes back, reusable once `event` has passed (same condition as set_pending). The buffer is null after.
  void release_after(device::Event event);
  // Gives the bytes back as the destructor would. A null buffer is an InternalError: a double release.
  void release();

 private:
  friend class HostPool;
  using Core = PoolCore<device::Event>;
  HostBuffer(std::shared_ptr<Core> core, const PoolBlock& block) noexcept;
  void give_back() noexcept;

  std::shared_ptr<Core> core_;
  PoolBlock block_;
  device::Event pending_;
};

class HostPool {
 public:
  // Limits are whole numbers of bytes, 0 means zero (PoolOptions says more).
  struct Options {
    Bytes slab_size = PoolOptions{}.slab_size;
    Bytes cache_limit = PoolOptions{}.cache_limit;
    std::optional<Bytes> host_limit = std::nullopt;
    // Pinned memory is what lets copies run beside the compute stream. Where it cannot be had the pool takes pageable
    // memory and says so once.
    bool pin = true;
    // The device that the copies are to and from; a plain CPU needs no pinned memory.
    c10::Device device = c10::kCPU;
  };

  // UserError when a size is negative or the slab size is zero.
  explicit HostPool(const Options& options);
  HostPool(const Options& options, std::unique_ptr<SlabSource> source);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  // Buffers that are still held keep the memory. Else waits on the host for copies in flight, then frees the slabs.
  ~HostPool();

  // Empty at the host limit, or when the host has no memory. Whatever is idle comes first; then a new slab; blocks in
  // flight are never waited for. REQUIRES: size >= 0. A buffer of zero bytes is not null but takes a granule.
  [[nodiscard]] std::optional<HostBuffer> try_acquire(Bytes size);
  // The same, with OutOfMemory (asked, locked, limit, peak) instead of empty.
  [[nodiscard]] HostBuffer acquire(Bytes size);

  // Gives back every slab that is wholly free now.
  void trim();

  // After a look at what has come back from flight.
  [[nodiscard]] PoolCounters counters() const;
  void reset_peaks();
  [[nodiscard]] const Options& options() const noexcept { return options_; }

 private:
  const Options options_;
  std::shared_ptr<PoolCore<device::Event>> core_;
};

}  // namespace neap::memory
