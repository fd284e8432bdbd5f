// torch-free
// What the engine did in one step, and whether it helped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "neap/base/bytes.h"

namespace neap::offload {

struct UnitBytes {
  std::string unit;
  Bytes bytes;
};

// Everything since the report before. Byte counts of storages count each storage once a pass, however many tensors
// alias it.
struct StepReport {
  // Forward.
  int64_t passes = 0;         // forward passes that saved something
  int64_t saved_tensors = 0;  // what autograd saved inside units
  int64_t kept_tensors = 0;   // of these, not considered: parameters, small ones, other devices, the policy's choice
  Bytes saved_bytes;          // storages considered
  Bytes offloaded_bytes;      // copied out
  int64_t offloaded_storages = 0;

  // Backward.
  Bytes reloaded_bytes;
  int64_t reloaded_storages = 0;
  int64_t late_reloads = 0;       // began only when they were needed
  int64_t forwarded_unpacks = 0;  // served from a device storage that was still there, although it had been copied

  // Time in which the compute stream had nothing to do but wait for our copies. Of asynchronous copies only what has
  // been measured by now: what is still running is told by the next report. Synchronous copies are exposed as a whole.
  int64_t exposed_wait_ns = 0;

  // The peak. `planned_drop`: bytes that had left by plan when backward began, the largest pass of the step;
  // `measured_drop`: of these, what had really been freed by then.
  Bytes planned_drop;
  Bytes measured_drop;
  Bytes stayed_bytes;  // by plan on the device at that moment: budget, tail, in flight
  std::vector<UnitBytes>
      still_referenced;                // copied, but some other owner kept it on the device; by the unit that saved it
  std::vector<std::string> never_hit;  // units configured that saved nothing in this step
  std::optional<Bytes> device_peak;    // as the device's allocator counts; empty on a plain CPU
  std::optional<Bytes> allocated_at_turn;  // when backward began
  std::string peak_piece;                  // the piece of the step in which it was reached, in words
  Bytes away_at_peak;                      // bytes that had left the device then

  // The host's side, and what has been learned.
  Bytes host_bytes;   // in use by saved storages now
  Bytes host_locked;  // all the pool holds
  Bytes host_locked_peak;
  Bytes prefetch_window;
  Bytes in_flight_window;

  // R: the part of the planned drop that came true. 1 when nothing was planned.
  double ratio() const;
  // One line per finding, empty when there is nothing to say: what kept the peak from falling, and what to do about it.
  std::vector<std::string> findings() const;
};

// For people: a few lines, the findings last.
std::string to_string(const StepReport& report);

}  // namespace neap::offload
