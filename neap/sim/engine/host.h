// torch-free
// The host as a party of its own: where it is in virtual time, and which device work it knows to be complete.
#pragma once

#include <array>
#include <cstdint>

#include "neap/sim/engine/types.h"
#include "neap/sim/engine/vector_clock.h"

namespace neap::sim {

class Engine;

// Guarded by the Engine.
struct Host {
  bool per_device = true;  // a time for each device, as if each were driven by a process of its own
  std::array<Nanoseconds, kMaxDevices> times{};
  VectorClock seen;
  uint64_t version = 0;  // changes with `seen`; unique over all hosts of an Engine

  uint32_t used = 0;  // bit per device

  Nanoseconds& time(int device) {
    used |= uint32_t{1} << device;
    return times[per_device ? static_cast<std::size_t>(device) : 0];
  }
};

// While it lives, this thread has a host of its own: it starts from what the shared one knows, has one time for all
// devices, and what it learns reaches the others when it ends. For ranks that are threads, and for threads whose
// ordering with the rest a test wants checked. At most one per thread.
class HostTimeline {
 public:
  explicit HostTimeline(Engine& engine);
  ~HostTimeline();
  HostTimeline(const HostTimeline&) = delete;
  HostTimeline& operator=(const HostTimeline&) = delete;

 private:
  friend class Engine;

  Engine& engine_;
  Host host_;
};

}  // namespace neap::sim
