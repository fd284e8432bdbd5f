#include "neap/sim/torch/device_allocator.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>

namespace neap::sim {
namespace {

void free_block(void* context) {
  if (context) engine().free(static_cast<Block*>(context));
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = Engine::current_device();
    if (bytes == 0) return {nullptr, nullptr, &free_block, sim_device(device)};
    MemoryShortage shortage;
    auto* block = engine().allocate(engine().current_stream(device), bytes, &shortage);
    if (!block) throw_out_of_memory(shortage);
    return owning_pointer(block, sim_device(device));
  }
  // The context is not the pointer, so there is no raw deleter; it also makes copy-on-write storages refuse us,
  // rightly.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}  // nothing is cached
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (auto* block = block_of(pointer)) engine().record_stream(block, engine_stream(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    using c10::CachingAllocator::StatType;
    const MemoryStats memory = engine().memory(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    // The engine keeps no running totals of bytes; `allocated` minus `freed` is the current value, as it has to be.
    const auto bytes = [](c10::CachingAllocator::StatArray& array, int64_t current, int64_t peak) {
      auto& stat = array[static_cast<std::size_t>(StatType::AGGREGATE)];
      stat.current = stat.allocated = current;
      stat.peak = peak;
    };
    bytes(stats.allocated_bytes, memory.current, memory.peak);
    bytes(stats.reserved_bytes, memory.current, memory.peak);
    bytes(stats.active_bytes, memory.current, memory.peak);
    bytes(stats.requested_bytes, memory.requested, memory.requested_peak);
    auto& blocks = stats.allocation[static_cast<std::size_t>(StatType::AGGREGATE)];
    blocks.current = memory.live_blocks;
    blocks.peak = memory.live_blocks;
    blocks.allocated = memory.allocations;
    blocks.freed = memory.frees;
    stats.num_ooms = memory.out_of_memory;
    stats.num_device_alloc = memory.allocations;
    stats.num_device_free = memory.frees;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { engine().reset_peak(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const MemoryStats memory = engine().memory(device);
    return {static_cast<std::size_t>(std::max<int64_t>(memory.capacity - memory.current, 0)),
            static_cast<std::size_t>(memory.capacity)};
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceAllocator;  // leaked: storages outlive static objects
  return *allocator;
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

c10::DataPtr owning_pointer(Block* block, c10::Device device) { return {block->data(), block, &free_block, device}; }

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto fresh = device_allocator().allocate(bytes);
  if (const std::size_t kept = std::min(bytes, storage.nbytes())) {
    const Range ranges[] = {{block_of(storage.data_ptr()), 0, kept, false}, {block_of(fresh), 0, kept, true}};
    engine().begin_kernel(engine().current_stream(storage.device().index()), ranges, "sim::resize",
                          {.bytes = 2.0 * static_cast<double>(kept)});
    std::memcpy(fresh.get(), storage.data(), kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void throw_out_of_memory(const MemoryShortage& shortage) { C10_THROW_ERROR(OutOfMemoryError, shortage.text()); }

}  // namespace neap::sim
