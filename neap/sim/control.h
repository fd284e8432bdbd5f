// torch-free
// How a program talks to the simulated accelerator beside torch: what the device is (DeviceConfig), what happened on it
// (MemoryStats, Counters, hazards), and knobs that exist for tests (held copy engines).
//
// Header-only on purpose: the implementation lives in libneap_sim.so, which a process loads with sim::load()
// (neap/sim/loader.h). Times are nanoseconds on the device's own clock unless said otherwise. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/base/host_task.h"

namespace neap::trace {
class Recorder;
}

namespace neap::sim {

// kVirtual: every cost comes from the description below, so the same program has the same times on every machine.
// kReal: queries, elapsed times and now are the wall clock's; the virtual clock still runs beside it.
enum class Clock { kReal, kVirtual };

enum class Link { kHostToDevice, kDeviceToHost, kPeer };
inline constexpr int kNumLinks = 3;

// The described device. 1 GB/s is one byte per nanosecond.
struct DeviceConfig {
  int devices = 1;                           // fixed once the device has been used
  Bytes capacity = Bytes(int64_t{4} << 30);  // per device; hard
  Bytes pinned_capacity = Bytes(0);          // of page-locked host memory, all devices together; 0 = no limit

  // 0 = unlimited: memcpy speed in real time, kDefaultLinkGbps on the virtual clock.
  double d2h_gbps = 0;
  double h2d_gbps = 0;
  double peer_gbps = 0;
  double latency_ns = 5'000;  // of one copy
  // Copies really take the described time. For a few tests of real overlap: wall-clock times scatter.
  bool realtime_copies = false;

  Clock clock = Clock::kVirtual;
  double gflops = 50'000;  // a kernel takes max(kernel_min_ns, flops / gflops, bytes / hbm_gbps)
  double hbm_gbps = 1'500;
  double kernel_min_ns = 2'000;
  double launch_ns = 4'000;  // host time to submit a kernel or a copy
  double event_ns = 1'000;   // host time to record an event or to make a stream wait for one

  bool hazard_check = false;
  // Report memory freed while another stream may use it at the free itself, not at the next allocation that could reuse
  // it. Right programs may order the two between free and reuse, so this is stricter than torch's own contract.
  bool strict_free = false;
  bool poison = false;  // fresh and freed device memory is filled with a pattern that reads as NaN in every float type
};
inline constexpr double kDefaultLinkGbps = 25;
inline constexpr int kMaxDevices = 8;

// Device bytes are counted rounded up to 512 each, as a caching allocator hands them out, and as asked ("requested").
struct MemoryStats {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t requested = 0;
  int64_t requested_peak = 0;
  int64_t live_blocks = 0;
  int64_t allocations = 0;  // since the start, as are the next two
  int64_t frees = 0;
  int64_t out_of_memory = 0;
  int64_t capacity = 0;  // 0 = no limit (page-locked memory only)

  bool operator==(const MemoryStats&) const = default;
};

struct LinkCounters {
  int64_t copies = 0;
  int64_t bytes = 0;
  int64_t busy_ns = 0;  // virtual

  bool operator==(const LinkCounters&) const = default;
};

// Since the start or the last reset_counters(). `_ns` is virtual time unless it says real.
struct Counters {
  LinkCounters h2d, d2h, peer;
  int64_t kernels = 0;
  int64_t kernel_busy_ns = 0;
  // Where the default stream lost time before a kernel or copy: it waited for an event (stall), or it had nothing to do
  // because the host had not submitted the work yet (launch bound).
  int64_t stall_ns = 0;
  int64_t launch_bound_ns = 0;
  int64_t host_wait_ns = 0;   // the host stood in synchronize() calls
  int64_t host_waits = 0;     // … this many times with something to wait for
  int64_t memory_waits = 0;   // allocations that fitted only after the host waited for late frees (record_stream)
  int64_t adopted = 0;        // blocks made from memory that a kernel had allocated
  int64_t drains = 0;         // kernels that really had to wait for queued work of their stream
  int64_t drain_wait_ns = 0;  // … and for how long, in real time
  int64_t threads = 0;        // worker threads started; not reset

  const LinkCounters& link(Link which) const {
    return which == Link::kHostToDevice ? h2d : which == Link::kDeviceToHost ? d2h : peer;
  }
  bool operator==(const Counters&) const = default;
};

// One per process.
class Control {
 public:
  virtual ~Control() = default;

  // REQUIRES: before the first use, or while nothing is queued. UserError on values that make no sense.
  virtual void configure(const DeviceConfig& config) = 0;
  virtual DeviceConfig config() const = 0;

  virtual MemoryStats memory(int device) const = 0;
  virtual MemoryStats pinned_memory() const = 0;
  virtual void reset_peak(int device) = 0;
  virtual void reset_pinned_peak() = 0;
  virtual Counters counters(int device) const = 0;
  virtual void reset_counters(int device) = 0;
  // The host's position on the device's clock; with Clock::kReal the steady clock.
  virtual int64_t host_time_ns(int device) const = 0;

  // What the hazard checker found since the last call, at most 100 texts. Each names both sides.
  virtual std::vector<std::string> take_hazards() = 0;
  // The host is about to read or write memory itself: checked against queued work when it is page-locked or device
  // memory, ignored otherwise.
  virtual void host_read(const void* data, int64_t bytes, const char* what) = 0;
  virtual void host_write(const void* data, int64_t bytes, const char* what) = 0;

  // Kernels, copies, waits and a memory counter on the virtual clock; null turns it off. The recorder must outlive its
  // use.
  virtual void set_recorder(trace::Recorder* recorder) = 0;
  virtual void manual_seed(uint64_t seed, int device) = 0;

  // Queues a function of the host on a stream, by its number in c10. It runs on the stream's worker; on the virtual
  // clock it holds the link between devices for the cost that it states, and counts as a copy there. The memory it
  // names stays until it has run, whoever frees it. For neap/device/host_task.h.
  virtual void run_on_stream(int device, int64_t stream, HostTask task) = 0;

  // Holds the copy engine: copies on this link stay queued, whatever the clock, until resume(). For tests of order.
  virtual void pause(int device, Link link) = 0;
  virtual void resume(int device, Link link) = 0;
};

// What libneap_sim.so exports, with C linkage. Registers the device on the first call; throws UserError when this
// process already runs another accelerator. The name changes with the interface above, so that a stale library is never
// used.
using ControlEntry = Control&();
inline constexpr const char* kControlSymbol = "neap_sim_control_v3";

}  // namespace neap::sim
