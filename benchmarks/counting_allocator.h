// Counts the bytes of live CPU tensors: resident memory would count what the C library keeps, too.
//
// A shared library with C functions, so that a Python process can load it next to torch and be measured with the same
// ruler. What is no tensor, such as buffers of Gloo, is not counted. Thread-safe.
#pragma once

#include <cstdint>

extern "C" {

// Takes the place of torch's allocator of CPU memory; tensors from before are not counted. Idempotent.
void neap_count_cpu_tensors(void);
int64_t neap_live_bytes(void);
// The most bytes since the last reset, which begins at the present level.
int64_t neap_peak_bytes(void);
void neap_reset_peak_bytes(void);
// What a reduction of ours over so many ranks holds of rows on the wire: no tensors, but memory all the same.
int64_t neap_reduction_scratch(int ranks);
}
