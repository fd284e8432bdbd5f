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

// Virtual time. Integers, and every cost is rounded to one: so two runs of a program compare equal exactly, and so do
// two stretches of one run wherever they begin.
using Nanoseconds = int64_t;
inline Nanoseconds rounded_nanoseconds(double nanoseconds) { return std::llround(nanoseconds); }

}  // namespace neap::sim
