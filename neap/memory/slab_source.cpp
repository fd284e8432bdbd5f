#include "neap/memory/slab_source.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <bit>
#include <exception>

#include "neap/base/log.h"

namespace neap::memory {
namespace {

at::HostAllocator* find_host_allocator(c10::DeviceType type) {
  try {
    return at::getHostAllocator(type);
  } catch (const c10::Error&) {  // a backend without one
    return nullptr;
  }
}

// Whether torch's caching allocator, which rounds to powers of two, stands behind the interface. Nothing says so; but
// its statistics do when asked for three pages. Allocators without statistics are taken at their word.
bool rounds_to_powers_of_two(at::HostAllocator* allocator) {
  if (allocator == nullptr) return false;
  try {
    const int64_t before = allocator->get_stats().active_bytes.current;
    const auto memory = allocator->allocate(3 * kGranularity);
    return allocator->get_stats().active_bytes.current - before == 4 * kGranularity;
  } catch (const std::exception&) {  // it cannot pin now; allocate() will say so
    return false;
  }
}

}  // namespace

StorageSlab::StorageSlab(c10::DataPtr memory, int64_t size, bool pinned, at::HostAllocator* cache)
    : storage_(c10::Storage::use_byte_size_t{}, static_cast<size_t>(size), std::move(memory)),
      pinned_(pinned),
      cache_(cache) {}

StorageSlab::~StorageSlab() {
  storage_ = {};
  if (cache_ == nullptr) return;
  try {
    cache_->empty_cache();  // else torch would keep the pages locked, and the pool's limits would be words only
  } catch (const std::exception& error) {
    log_error("[memory] pinned memory could not be returned: ", error.what());
  }
}

std::unique_ptr<SlabMemory> PageableSource::allocate(int64_t bytes) {
  try {
    return std::make_unique<StorageSlab>(c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes)), bytes,
                                         /*pinned=*/false);
  } catch (const std::exception&) {  // how torch says that there is no memory
    return nullptr;
  }
}

PinnedSource::PinnedSource(c10::Device device)
    : PinnedSource(device, find_host_register(device.type()), find_host_allocator(device.type())) {}

PinnedSource::PinnedSource(c10::Device device, std::optional<HostRegister> locker, at::HostAllocator* allocator)
    : device_(device), locker_(locker), allocator_(allocator), rounds_(!locker && rounds_to_powers_of_two(allocator)) {}

int64_t PinnedSource::round_up(int64_t bytes) const {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  const auto size = static_cast<uint64_t>(bytes);
  if (!rounds_ || size > Config::pinned_max_round_threshold()) return bytes;
  return static_cast<int64_t>(std::bit_ceil(size));
}

std::unique_ptr<SlabMemory> PinnedSource::allocate(int64_t bytes) {
  try {
    if (auto slab = allocate_pinned(bytes)) return slab;
    warn_once(bytes, "the system refused");
  } catch (const c10::Error& error) {
    warn_once(bytes, error.what_without_backtrace());
  } catch (const std::exception& error) {
    warn_once(bytes, error.what());
  }
  return pageable_.allocate(bytes);
}

std::unique_ptr<SlabMemory> PinnedSource::allocate_pinned(int64_t bytes) {
  // Locking must not create a context on a device that this process does not use.
  const c10::OptionalDeviceGuard guard(device_);
  if (locker_) {
    if (auto memory = allocate_locked(*locker_, bytes)) {
      return std::make_unique<StorageSlab>(std::move(memory), bytes, /*pinned=*/true);
    }
  }
  if (allocator_ == nullptr) return nullptr;
  return std::make_unique<StorageSlab>(allocator_->allocate(static_cast<size_t>(bytes)), bytes, /*pinned=*/true,
                                       allocator_);
}

void PinnedSource::warn_once(int64_t bytes, const std::string& reason) {
  if (warned_.exchange(true)) return;
  log_warning("[memory] pinned host memory for ", device_, " was expected; ", Bytes(bytes), " could not be had (",
              reason,
              "); copies use pageable memory and will not overlap the computation; raise the limit of locked memory "
              "(ulimit -l) or lower host_limit");
}

}  // namespace neap::memory
