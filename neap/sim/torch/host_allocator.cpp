#include "neap/sim/torch/host_allocator.h"

#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/device_allocator.h"

namespace neap::sim {
namespace {

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    MemoryShortage shortage;
    auto* block = engine().allocate_pinned(bytes, &shortage);
    if (!block) throw_out_of_memory(shortage);
    return owning_pointer(block, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  // As CUDA's: false for memory that is not ours.
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    auto* block = engine().find_pinned(pointer);
    if (!block || (context && context != block)) return false;
    engine().record_stream(block, engine_stream(stream));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const MemoryStats memory = engine().pinned_memory();
    at::HostStats stats;
    for (auto* bytes : {&stats.active_bytes, &stats.allocated_bytes}) {
      bytes->current = bytes->allocated = memory.requested;
      bytes->peak = memory.requested_peak;
    }
    for (auto* blocks : {&stats.active_requests, &stats.allocations}) {
      blocks->current = blocks->peak = memory.live_blocks;
      blocks->allocated = memory.allocations;
      blocks->freed = memory.frees;
    }
    stats.num_host_alloc = memory.allocations;
    stats.num_host_free = memory.frees;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { engine().reset_pinned_peak(); }
};

}  // namespace

at::HostAllocator& host_allocator() {
  static auto* allocator = new HostAllocator;  // leaked: storages outlive static objects
  return *allocator;
}

}  // namespace neap::sim
