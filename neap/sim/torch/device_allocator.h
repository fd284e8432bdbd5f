// Device memory for torch: blocks of the engine as DataPtrs. Thread-safe.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "neap/sim/torch/backend.h"

namespace neap::sim {

c10::DeviceAllocator& device_allocator();

// The engine's block behind memory of device_allocator(), adopt() or host_allocator(); null for anything else.
Block* block_of(const c10::DataPtr& pointer);

// A DataPtr that owns `block`; `device` is what it says it lies on.
c10::DataPtr owning_pointer(Block* block, c10::Device device);

// Grows or shrinks by allocating anew and copying on the current stream, as the hooks' resize promises.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

// c10::OutOfMemoryError with what was asked, what is free, the peak and the capacity.
[[noreturn]] void throw_out_of_memory(const MemoryShortage& shortage);

}  // namespace neap::sim
