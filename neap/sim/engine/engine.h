// torch-free
// The simulated accelerator without torch: memory, streams, events, copy engines, a virtual clock and a hazard checker.
//
// - Device memory is ordinary host memory with exact accounting and a hard capacity.
// - A stream is a queue. Copies, event records and event waits are queued and run by one worker thread per stream,
//   started when first needed; what a stream with nothing before it can do sooner than a thread is woken, the caller
//   does. Kernels are the caller's: begin_kernel() waits for the stream's queue, then the caller computes inline and
//   the kernel is done.
// - Virtual time is fixed at submission (list scheduling on integers): it does not depend on how fast the real threads
//   run. The same program has the same times, the same answers from query() and the same peaks on every machine.
// - Hazards are found at submission by vector clocks over (stream, byte range), so a wrong program is reported
//   even when it got lucky.
//
// The host has a position in virtual time per device, so that ranks which are threads of one process have their own;
// what it knows to be complete is shared by all threads of the process, because how they order each other is not
// visible here. A thread that opens a HostTimeline has both for itself.
//
// Thread-safe. Calls that wait do so for the real work; they throw what a failed copy of that stream threw, once. A
// wait that a paused link makes endless throws InternalError after half a minute instead.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/host_task.h"
#include "neap/base/mutex.h"
#include "neap/sim/control.h"
#include "neap/sim/engine/cost_model.h"
#include "neap/sim/engine/event.h"
#include "neap/sim/engine/host.h"
#include "neap/sim/engine/link.h"
#include "neap/sim/engine/memory.h"
#include "neap/sim/engine/stream.h"
#include "neap/sim/engine/types.h"

namespace neap::sim {

class Engine {
 public:
  // Waits give up on a paused link after `patience`.
  explicit Engine(const DeviceConfig& config = {}, std::chrono::nanoseconds patience = std::chrono::seconds(30));
  // Waits for queued work and joins the workers. Blocks that are still allocated are left to their owners' leak
  // checker.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // REQUIRES: nothing queued, no link paused. UserError on values that make no sense.
  void configure(const DeviceConfig& config) NEAP_EXCLUDES(mutex_);
  DeviceConfig config() const NEAP_EXCLUDES(mutex_);
  int device_count() const noexcept { return device_count_.load(std::memory_order_relaxed); }

  // ---- memory
  // --------------------------------------------------------------------------------------------------------- A block
  // whose home is `on`: other streams must be ordered after this point before they use it. Null, with `shortage` filled
  // in, when it does not fit.
  Block* allocate(Stream* on, std::size_t bytes, MemoryShortage* shortage) NEAP_EXCLUDES(mutex_);
  // Charges memory that a kernel on `on` has just produced; drop(argument) will give it back. Null as above; then the
  // memory is still the caller's.
  Block* adopt(Stream* on, void* data, std::size_t bytes, void (*drop)(void*), void* argument, MemoryShortage* shortage)
      NEAP_EXCLUDES(mutex_);
  // Page-locked host memory. Null, with `shortage` filled in, beyond DeviceConfig::pinned_capacity.
  Block* allocate_pinned(std::size_t bytes, MemoryShortage* shortage) NEAP_EXCLUDES(mutex_);
  // The block's bytes are free at once, or once the recorded streams have passed this point. Queued copies keep the
  // memory itself alive, so that a wrong program is reported rather than crashing.
  void free(Block* block) noexcept NEAP_EXCLUDES(mutex_);
  // Another stream uses the block: free() will wait for what that stream has queued by then.
  void record_stream(Block* block, Stream* user) NEAP_EXCLUDES(mutex_);
  // The page-locked block that holds this address, or null.
  Block* find_pinned(const void* address) const NEAP_EXCLUDES(mutex_);
  // The device whose memory holds this address, or -1. Looks at every live block.
  int find_device(const void* address) const NEAP_EXCLUDES(mutex_);
  // The host itself reads or writes memory of ours; reported when queued work is not known to be complete.
  void host_read(const void* data, std::size_t bytes, const char* what) NEAP_EXCLUDES(mutex_);
  void host_write(const void* data, std::size_t bytes, const char* what) NEAP_EXCLUDES(mutex_);

  // ---- streams
  // -------------------------------------------------------------------------------------------------------- Made on
  // first use; UserError for a device or id out of range.
  Stream* stream(int device, int id) {
    const bool known = static_cast<unsigned>(device) < kMaxDevices && static_cast<unsigned>(id) < kMaxStreams;
    Stream* made = known ? streams_[device][id].load(std::memory_order_acquire) : nullptr;
    return made ? made : make_stream(device, id);
  }
  // Round robin over four streams of each priority.
  Stream* pool_stream(int device, bool high_priority) NEAP_EXCLUDES(mutex_);
  // One that no pool hands out. After 23 on one device they repeat.
  Stream* new_stream(int device) NEAP_EXCLUDES(mutex_);
  // Per thread: the current device, and the current stream of each device. Both start at 0.
  // REQUIRES of the exchanges: device below kMaxDevices.
  Stream* current_stream(int device);
  static int exchange_stream(int device, int id) noexcept;
  static int current_device() noexcept;
  static int exchange_device(int device) noexcept;

  // ---- work
  // ----------------------------------------------------------------------------------------------------------- Waits
  // until the stream's queue is empty, then returns for the caller to compute inline. `what` must live for ever.
  void begin_kernel(Stream* on, std::span<const Range> ranges, const char* what, KernelCost cost) NEAP_EXCLUDES(mutex_);
  // Where a trace draws a copy, and under which name; empty: on its link's track, as `what` says.
  struct Drawn {
    std::string_view track, name;
  };
  // Queues `work`, which moves `bytes` over `link` in messages of which `latencies` come one after another. With
  // kForCompletion it runs before the call returns, on this thread.
  void submit_copy(Stream* on, Link link, std::size_t bytes, std::span<const Range> ranges, const char* what,
                   std::function<void()> work, Wait wait, int latencies = 1, Drawn drawn = {}) NEAP_EXCLUDES(mutex_);
  // The same for a copy that only moves bytes. A few of them, on a stream that has nothing to wait for, are there when
  // the call returns; the clock and the checker take them for queued all the same.
  struct Move {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  void submit_copy(Stream* on, Link link, Move move, std::span<const Range> ranges, const char* what, Wait wait)
      NEAP_EXCLUDES(mutex_);
  // A function of the host in the order of the stream: a copy over the link between devices that says itself what it
  // touches, by address.
  void submit_host_task(Stream* on, HostTask task) NEAP_EXCLUDES(mutex_);
  // Waits for the queued work to be really done; the clocks and the checker's knowledge stay as they are.
  void drain(Stream* stream) NEAP_EXCLUDES(mutex_);
  // The host waits for the stream: what was queued is done, known to be done, and the host's clock is past it.
  void synchronize(Stream* stream) NEAP_EXCLUDES(mutex_);
  void synchronize_device(int device) NEAP_EXCLUDES(mutex_);
  // Has the stream finished? On the virtual clock by its time; asking costs the host a microsecond there, so that a
  // loop that polls ends.
  bool query(Stream* stream) NEAP_EXCLUDES(mutex_);

  // ---- events
  // ---------------------------------------------------------------------------------------------------------
  void record(Event& event, Stream* on) NEAP_EXCLUDES(mutex_);
  // Later work of `stream` waits for the latest recording as it is now; nothing to do when there is none.
  void wait(Stream* stream, const Event& event) NEAP_EXCLUDES(mutex_);
  bool query(const Event& event) NEAP_EXCLUDES(mutex_);  // true when never recorded
  void synchronize(const Event& event) NEAP_EXCLUDES(mutex_);
  // From `from` to `to`, on the configured clock. UserError unless both were recorded and are complete.
  double elapsed_ms(const Event& from, const Event& to) NEAP_EXCLUDES(mutex_);

  // ---- reports
  // --------------------------------------------------------------------------------------------------------
  MemoryStats memory(int device) NEAP_EXCLUDES(mutex_);
  MemoryStats pinned_memory() const NEAP_EXCLUDES(mutex_);
  void reset_peak(int device) NEAP_EXCLUDES(mutex_);
  void reset_pinned_peak() NEAP_EXCLUDES(mutex_);
  Counters counters(int device) const NEAP_EXCLUDES(mutex_);
  void reset_counters(int device) NEAP_EXCLUDES(mutex_);
  std::vector<std::string> take_hazards() NEAP_EXCLUDES(mutex_);
  int64_t host_time_ns(int device) NEAP_EXCLUDES(mutex_);
  int64_t stream_time_ns(const Stream* stream) const NEAP_EXCLUDES(mutex_);
  // Host work that the engine cannot see, such as an interpreter's.
  void advance_host(int device, double nanoseconds) NEAP_EXCLUDES(mutex_);
  void set_recorder(trace::Recorder* recorder) NEAP_EXCLUDES(mutex_);

  // ---- for tests, and the end of the process
  // ----------------------------------------------------------------------------
  void pause(int device, Link link) NEAP_EXCLUDES(mutex_);
  void resume(int device, Link link) NEAP_EXCLUDES(mutex_);
  // Releases paused links, waits for queued work and joins the workers. Later copies run on the thread that submits
  // them.
  void stop_workers() noexcept NEAP_EXCLUDES(mutex_);

 private:
  friend class HostTimeline;

  // A freed block that recorded streams may still use.
  struct LateFree {
    Block* block;
    std::vector<std::shared_ptr<const Recording>> until;
  };
  struct Device {
    MemoryBook memory;
    Block* live = nullptr;  // list of its blocks
    std::array<LinkSchedule, kNumLinks> links;
    Totals totals;
    int next_pool = 0;
    int next_high = 0;
    int next_new = 0;
  };
  // When work of a stream runs: it could at `ready` for all that the stream's own work and the host say; at `start` the
  // events that it waits for are there too.
  struct Slot {
    Nanoseconds ready;
    Nanoseconds start;
  };

  // engine.cpp
  void apply(const DeviceConfig& config) NEAP_REQUIRES(mutex_);
  Stream* make_stream(int device, int id) NEAP_EXCLUDES(mutex_);
  int checked(int device) const;
  Device& device_at(int device) NEAP_REQUIRES(mutex_) { return devices_[static_cast<std::size_t>(device)]; }
  LinkGate& gate(int device, Link link) {
    return gates_[static_cast<std::size_t>(device)][static_cast<std::size_t>(link)];
  }
  bool any_paused() const { return paused_links_.load(std::memory_order_relaxed) > 0; }
  [[noreturn]] void throw_stuck() const;
  Host& host() NEAP_REQUIRES(mutex_);
  int64_t now_ns(int device) NEAP_REQUIRES(mutex_);  // of the configured clock

  // engine_memory.cpp
  Block* charge(Stream* on, std::size_t bytes, void* adopted, const char* what, MemoryShortage* shortage)
      NEAP_EXCLUDES(mutex_);
  Block* try_charge(Stream* on, std::size_t bytes, void* adopted, const char* what) NEAP_REQUIRES(mutex_);
  bool uncharge(Block* block) NEAP_REQUIRES(mutex_);
  void give_back(Block* block) NEAP_REQUIRES(mutex_);
  bool over(const LateFree& late, int device, std::shared_ptr<const Recording>& behind) NEAP_REQUIRES(mutex_);
  // Waits for the real work of frees that are over on the clock, but of this device's streams alone: another's may wait
  // for this very thread, when ranks are threads and the work is a collective.
  void settle_late_frees(int device) NEAP_EXCLUDES(mutex_);
  bool wait_for_late_frees(int device) NEAP_EXCLUDES(mutex_);
  void trace_memory(int device) NEAP_REQUIRES(mutex_);
  const Block* find_block(const void* address) const NEAP_REQUIRES(mutex_);

  // engine_work.cpp
  void open(Stream* stream, Nanoseconds host_cost) NEAP_REQUIRES(mutex_);
  Slot place(const Stream* stream) NEAP_REQUIRES(mutex_);
  void begin_work(Stream* stream, Slot slot) NEAP_REQUIRES(mutex_);
  // Everything about a copy but the copying. Returns what it takes on the clock.
  Nanoseconds account_copy(Stream* on, Link link, std::size_t bytes, std::span<const Range> ranges, const char* what,
                           int latencies, const Drawn& drawn) NEAP_REQUIRES(mutex_);
  bool copies_at_once(Stream* on) NEAP_REQUIRES(mutex_);
  // REQUIRES: a recording to be made is known to nobody else yet who does not take the lock first.
  void push(Stream* stream, Task task) NEAP_REQUIRES(mutex_);
  std::function<void()> copy_task(Stream* on, Link link, std::span<const Range> ranges, const char* what,
                                  std::function<void()> work, std::chrono::nanoseconds duration) NEAP_REQUIRES(mutex_);
  std::shared_ptr<Recording> make_recording(Stream* stream) NEAP_REQUIRES(mutex_);
  bool quiet(Stream* stream) NEAP_REQUIRES(mutex_);
  void wait_until_quiet(Stream* stream) NEAP_EXCLUDES(mutex_);
  void wait_for(const Recording& recording) const NEAP_EXCLUDES(mutex_);
  bool reached(const Recording& recording) NEAP_REQUIRES(mutex_);
  void host_learns(const VectorClock& seen) NEAP_REQUIRES(mutex_);
  void host_waits(int device, Nanoseconds until, const char* what) NEAP_REQUIRES(mutex_);

  // engine_hazards.cpp
  void check(Stream* stream, std::span<const Range> ranges, const char* what) NEAP_REQUIRES(mutex_);
  void check_free(Block* block) NEAP_REQUIRES(mutex_);
  void check_reuse(Stream* home) NEAP_REQUIRES(mutex_);
  void check_host(const void* data, std::size_t bytes, bool write, const char* what) NEAP_EXCLUDES(mutex_);
  void report(const Block& block, const std::string& text) NEAP_REQUIRES(mutex_);
  std::string describe(const Access& access) const NEAP_REQUIRES(mutex_);

  const std::chrono::nanoseconds patience_;
  std::atomic<int> device_count_{1};
  std::array<std::array<std::atomic<Stream*>, kMaxStreams>, kMaxDevices> streams_{};
  std::array<std::array<LinkGate, kNumLinks>, kMaxDevices> gates_;
  std::atomic<int> paused_links_{0};
  BlockStore blocks_;  // make() and discard() under mutex_

  mutable Mutex mutex_;
  DeviceConfig config_ NEAP_GUARDED_BY(mutex_);
  CostModel costs_ NEAP_GUARDED_BY(mutex_);
  std::array<Device, kMaxDevices> devices_ NEAP_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Stream>> by_index_ NEAP_GUARDED_BY(mutex_);
  Host shared_host_ NEAP_GUARDED_BY(mutex_);
  uint64_t host_version_ NEAP_GUARDED_BY(mutex_) = 0;
  MemoryBook pinned_ NEAP_GUARDED_BY(mutex_);
  std::map<uintptr_t, Block*> pinned_blocks_ NEAP_GUARDED_BY(mutex_);  // by address
  std::vector<LateFree> late_frees_ NEAP_GUARDED_BY(mutex_);
  std::atomic<bool> any_late_free_{false};
  std::vector<std::string> hazards_ NEAP_GUARDED_BY(mutex_);
  trace::Recorder* recorder_ NEAP_GUARDED_BY(mutex_) = nullptr;
  bool stopped_ NEAP_GUARDED_BY(mutex_) = false;
};

}  // namespace neap::sim
