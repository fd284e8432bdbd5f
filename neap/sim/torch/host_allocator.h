// Page-locked host memory for torch: what `pinned_memory(true)` and `pin_memory()` hand out. Thread-safe.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace neap::sim {

// Allocates exactly what is asked for and caches nothing; pools are the callers' business.
at::HostAllocator& host_allocator();

}  // namespace neap::sim
