// torch-free
// What held the device's memory when it ran out, and which settings would lower it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/base/error.h"
#include "neap/train/config.h"

namespace neap::train {

struct MemoryUse {
  Bytes parameters;
  Bytes gradients;  // the ones that existed when memory ran out
  Bytes optimizer;
  std::optional<Bytes> peak;      // most that was allocated in this step; empty where nobody counts
  std::optional<Bytes> capacity;  // empty: unlimited or unknown

  // Of the peak, what is none of the three: saved activations, and what operators use while they run.
  std::optional<Bytes> activations() const;
  // What every step holds at its end, whatever becomes of activations.
  Bytes floor() const { return parameters + parameters + optimizer; }
};

struct Shortage {
  std::string when;    // "the forward pass of step 3"
  std::string reason;  // what the allocator said
  MemoryUse use;
};

// One remedy a line, the most effective first.
std::vector<std::string> remedies(const MemoryUse& use, const RunConfig& config);

// The whole report: what happened in the first line, then the holders, then the remedies.
std::string describe(const Shortage& shortage, const RunConfig& config);

class DeviceOutOfMemory : public OutOfMemory {
 public:
  explicit DeviceOutOfMemory(Shortage shortage) : OutOfMemory(shortage.reason), shortage_(std::move(shortage)) {}
  const Shortage& shortage() const noexcept { return shortage_; }

 private:
  Shortage shortage_;
};

}  // namespace neap::train
