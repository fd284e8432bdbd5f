// torch-free
// The few names every part of the simulated accelerator's engine shares.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "neap/sim/control.h"

namespace neap::sim {

inline constexpr int kMaxStreams = 32;  // per device; id 0 is the default stream
inline constexpr std::size_t kGranularity = 512;

class Block;   // memory.h: one allocation, on a device or page-locked
class Stream;  // stream.h: one queue of a device

// Bytes [begin, end) of a block that an operation reads or writes.
struct Range {
  Block* block = nullptr;  // null: memory the engine does not manage, ignored
  std::size_t begin = 0;
  std::size_t end = 0;
  bool write = false;
};

struct KernelCost {
  double flops = 0;
  double bytes = 0;  // read and written
};

enum class Wait { kNo, kForCompletion };

// Virtual time in picoseconds: integers, so that two runs compare equal exactly.
using Picoseconds = int64_t;
inline Picoseconds picoseconds(double nanoseconds) { return std::llround(nanoseconds * 1e3); }
inline int64_t whole_nanoseconds(Picoseconds time) { return time / 1000; }

}  // namespace neap::sim
