// Where a HostPool's slabs come from in a torch process: page-locked memory for a device, or pageable memory.
//
// Sizes are exact wherever the backend lets us lock memory of our own; elsewhere torch's pinned-memory allocator is
// asked, and when that rounds up to powers of two the pool is told so and uses the rest (docs/decisions/
// 0004-pinned-slabs.md). Thread-safe.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "neap/memory/host_register.h"
#include "neap/memory/pool_types.h"

namespace neap::memory {

// A slab as torch sees it. Views of the storage keep the memory beyond the slab's own life.
class StorageSlab final : public SlabMemory {
 public:
  // `cache` is where the freed memory would linger, to be told to let go; may be null.
  StorageSlab(c10::DataPtr memory, int64_t size, bool pinned, at::HostAllocator* cache = nullptr);
  ~StorageSlab() override;
  [[nodiscard]] std::byte* data() const noexcept override { return static_cast<std::byte*>(storage_.mutable_data()); }
  [[nodiscard]] bool pinned() const noexcept override { return pinned_; }
  [[nodiscard]] const c10::Storage& storage() const noexcept { return storage_; }

 private:
  c10::Storage storage_;
  const bool pinned_;
  at::HostAllocator* const cache_;
};

class PageableSource final : public SlabSource {
 public:
  [[nodiscard]] std::unique_ptr<SlabMemory> allocate(int64_t bytes) override;
};

// Pinned for the copies of one device. When pinning fails: pageable, with one warning per source.
class PinnedSource final : public SlabSource {
 public:
  explicit PinnedSource(c10::Device device);
  // For tests: what finds and fails to find memory. Both may be absent.
  PinnedSource(c10::Device device, std::optional<HostRegister> locker, at::HostAllocator* allocator);

  [[nodiscard]] int64_t round_up(int64_t bytes) const override;
  [[nodiscard]] std::unique_ptr<SlabMemory> allocate(int64_t bytes) override;

 private:
  std::unique_ptr<SlabMemory> allocate_pinned(int64_t bytes);
  void warn_once(int64_t bytes, const std::string& reason);

  const c10::Device device_;
  const std::optional<HostRegister> locker_;
  at::HostAllocator* const allocator_;
  const bool rounds_;
  std::atomic<bool> warned_ = false;
  PageableSource pageable_;
};

}  // namespace neap::memory
