// torch-free
#include "neap/sim/engine/config.h"

#include <cmath>

#include "neap/base/error.h"

namespace neap::sim {
namespace {

void check_not_negative(const char* name, double value) {
  NEAP_CHECK(std::isfinite(value) && value >= 0, "[sim.", name,
             "] expected a finite number that is not negative; found ", value);
}

void check_positive(const char* name, double value) {
  NEAP_CHECK(std::isfinite(value) && value > 0, "[sim.", name, "] expected a finite number above zero; found ", value);
}

}  // namespace

void check_config(const DeviceConfig& config) {
  NEAP_CHECK(config.devices >= 1 && config.devices <= kMaxDevices, "[sim.count] expected 1 to ", kMaxDevices,
             "; found ", config.devices);
  NEAP_CHECK(config.capacity.count > 0, "[sim.capacity] expected a size above zero; found ", config.capacity.count);
  NEAP_CHECK(config.pinned_capacity.count >= 0, "[sim.pinned_capacity] expected a size, or 0 for no limit; found ",
             config.pinned_capacity.count);
  check_not_negative("d2h", config.d2h_gbps);
  check_not_negative("h2d", config.h2d_gbps);
  check_not_negative("peer", config.peer_gbps);
  check_not_negative("latency", config.latency_ns);
  check_positive("gflops", config.gflops);
  check_positive("hbm", config.hbm_gbps);
  check_not_negative("kernel_min", config.kernel_min_ns);
  check_not_negative("launch", config.launch_ns);
  check_not_negative("event", config.event_ns);
}

}  // namespace neap::sim
