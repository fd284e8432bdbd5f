// torch-free
// What things cost on the virtual clock, worked out once from the described device; and the sums of what they did cost.
#pragma once

#include <algorithm>
#include <array>

#include "neap/sim/engine/types.h"

namespace neap::sim {

// A roofline for kernels, latency + bytes / rate for copies.
class CostModel {
 public:
  CostModel() = default;
  explicit CostModel(const DeviceConfig& config)
      : launch(rounded_nanoseconds(config.launch_ns)),
        event(rounded_nanoseconds(config.event_ns)),
        kernel_min_ns_(config.kernel_min_ns),
        ns_per_flop_(1 / config.gflops),
        ns_per_byte_(1 / config.hbm_gbps),
        latency_ns_(config.latency_ns),
        link_gbps_{config.h2d_gbps, config.d2h_gbps, config.peer_gbps} {}

  Nanoseconds launch = 0;  // host time of a kernel or copy
  Nanoseconds event = 0;   // host time of an event record or wait

  Nanoseconds kernel(KernelCost cost) const {
    return rounded_nanoseconds(std::max({kernel_min_ns_, cost.flops * ns_per_flop_, cost.bytes * ns_per_byte_}));
  }
  Nanoseconds copy(Link link, std::size_t bytes, int latencies = 1) const {
    const double given = link_gbps_[static_cast<std::size_t>(link)];
    return rounded_nanoseconds(latency_ns_ * latencies +
                               static_cast<double>(bytes) / (given > 0 ? given : kDefaultLinkGbps));
  }
  bool limited(Link link) const { return link_gbps_[static_cast<std::size_t>(link)] > 0; }

 private:
  double kernel_min_ns_ = 0;
  double ns_per_flop_ = 0;
  double ns_per_byte_ = 0;
  double latency_ns_ = 0;
  std::array<double, kNumLinks> link_gbps_{};  // 0: not limited
};

// What Counters is made of.
struct Totals {
  struct OfLink {
    int64_t copies = 0;
    int64_t bytes = 0;
    Nanoseconds busy = 0;
  };
  std::array<OfLink, kNumLinks> links{};
  int64_t kernels = 0;
  Nanoseconds kernel_busy = 0;
  Nanoseconds stall = 0;
  Nanoseconds launch_bound = 0;
  Nanoseconds host_wait = 0;
  int64_t host_waits = 0;
  int64_t memory_waits = 0;
  int64_t adopted = 0;
  int64_t drains = 0;
  int64_t drain_wait_ns = 0;  // real
  int64_t threads = 0;

  Counters counters() const;
};

}  // namespace neap::sim
