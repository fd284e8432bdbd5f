// torch-free
#include "neap/sim/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "neap/base/error.h"
#include "neap/sim/engine/config.h"

namespace neap::sim {
namespace {

// Stream ids of one device: the default stream, the two pools, then those that no pool hands out.
constexpr int kPoolSize = 4;
constexpr int kFirstPool = 1;
constexpr int kFirstHigh = kFirstPool + kPoolSize;
constexpr int kFirstNew = kFirstHigh + kPoolSize;

// Numbers, not pointers: they mean the same to every Engine of the process.
thread_local int tls_device = 0;
thread_local std::array<int, kMaxDevices> tls_streams{};
thread_local HostTimeline* tls_timeline = nullptr;

}  // namespace

Engine::Engine(const DeviceConfig& config, std::chrono::nanoseconds patience) : patience_(patience) {
  check_config(config);
  MutexLock lock(mutex_);
  apply(config);
}

Engine::~Engine() { stop_workers(); }

void Engine::apply(const DeviceConfig& config) {
  config_ = config;
  costs_ = CostModel(config);
  for (Device& device : devices_) device.memory.set_capacity(config.capacity.count);
  pinned_.set_capacity(config.pinned_capacity.count);
  device_count_.store(config.devices, std::memory_order_relaxed);
}

void Engine::configure(const DeviceConfig& config) {
  check_config(config);
  NEAP_CHECK(!any_paused(), "[sim] configure() expects no paused link; resume it first");
  MutexLock lock(mutex_);
  NEAP_CHECK(by_index_.empty() || config.devices == config_.devices, "[sim.count] expected ", config_.devices,
             ", the number this process has used already; found ", config.devices,
             "; set it before the first use of the device");
  for (const auto& stream : by_index_)
    NEAP_CHECK(quiet(stream.get()), "[sim] configure() expects nothing queued; found work on ", stream->name(),
               "; synchronize first");
  apply(config);
}

DeviceConfig Engine::config() const {
  MutexLock lock(mutex_);
  return config_;
}

// ---- streams
// ----------------------------------------------------------------------------------------------------------

int Engine::checked(int device) const {
  NEAP_CHECK(device >= 0 && device < device_count(), "[sim] expected a device index below ", device_count(), "; found ",
             device);
  return device;
}

Stream* Engine::make_stream(int device, int id) {
  checked(device);
  NEAP_CHECK(id >= 0 && id < kMaxStreams, "[sim] expected a stream id below ", kMaxStreams, "; found ", id);
  MutexLock lock(mutex_);
  std::atomic<Stream*>& slot = streams_[static_cast<std::size_t>(device)][static_cast<std::size_t>(id)];
  if (Stream* made = slot.load(std::memory_order_acquire)) return made;
  by_index_.push_back(std::make_unique<Stream>(device, id, static_cast<int>(by_index_.size())));
  slot.store(by_index_.back().get(), std::memory_order_release);
  return by_index_.back().get();
}

Stream* Engine::pool_stream(int device, bool high_priority) {
  int id = 0;
  {
    MutexLock lock(mutex_);
    Device& of = device_at(checked(device));
    id = high_priority ? kFirstHigh + of.next_high++ % kPoolSize : kFirstPool + of.next_pool++ % kPoolSize;
  }
  return stream(device, id);
}

Stream* Engine::new_stream(int device) {
  int id = 0;
  {
    MutexLock lock(mutex_);
    id = kFirstNew + device_at(checked(device)).next_new++ % (kMaxStreams - kFirstNew);
  }
  return stream(device, id);
}

Stream* Engine::current_stream(int device) {
  return stream(device, tls_streams[static_cast<std::size_t>(checked(device))]);
}

int Engine::exchange_stream(int device, int id) noexcept {
  return std::exchange(tls_streams[static_cast<std::size_t>(device)], id);
}

int Engine::current_device() noexcept { return tls_device; }

int Engine::exchange_device(int device) noexcept { return std::exchange(tls_device, device); }

// ---- host
// -------------------------------------------------------------------------------------------------------------

Host& Engine::host() {
  return tls_timeline != nullptr && &tls_timeline->engine_ == this ? tls_timeline->host_ : shared_host_;
}

HostTimeline::HostTimeline(Engine& engine) : engine_(engine) {
  NEAP_ASSERT(tls_timeline == nullptr, "a thread opens one HostTimeline at a time");
  MutexLock lock(engine.mutex_);
  const Host& shared = engine.shared_host_;
  host_.per_device = false;
  host_.times[0] = shared.times[static_cast<std::size_t>(Engine::current_device())];
  host_.seen = shared.seen;
  host_.version = shared.version;
  tls_timeline = this;
}

HostTimeline::~HostTimeline() {
  MutexLock lock(engine_.mutex_);
  tls_timeline = nullptr;
  engine_.host_learns(host_.seen);
  for (int device = 0; device < kMaxDevices; ++device) {
    if ((host_.used >> device & 1U) == 0) continue;
    Nanoseconds& shared = engine_.shared_host_.time(device);
    shared = std::max(shared, host_.times[0]);
  }
}

int64_t Engine::now_ns(int device) {
  if (config_.clock == Clock::kVirtual) return host().time(device);
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

int64_t Engine::host_time_ns(int device) {
  MutexLock lock(mutex_);
  return now_ns(checked(device));
}

int64_t Engine::stream_time_ns(const Stream* stream) const {
  MutexLock lock(mutex_);
  return std::max(stream->free_at_, stream->barrier_);
}

void Engine::advance_host(int device, double nanoseconds) {
  NEAP_CHECK(nanoseconds >= 0, "[sim] host time goes forward only; found ", nanoseconds, " ns");
  MutexLock lock(mutex_);
  host().time(checked(device)) += rounded_nanoseconds(nanoseconds);
}

// ---- reports
// ----------------------------------------------------------------------------------------------------------

MemoryStats Engine::memory(int device) {
  settle_late_frees(device);
  MutexLock lock(mutex_);
  return device_at(checked(device)).memory.stats();
}

MemoryStats Engine::pinned_memory() const {
  MutexLock lock(mutex_);
  return pinned_.stats();
}

void Engine::reset_peak(int device) {
  settle_late_frees(device);
  MutexLock lock(mutex_);
  device_at(checked(device)).memory.reset_peak();
}

void Engine::reset_pinned_peak() {
  MutexLock lock(mutex_);
  pinned_.reset_peak();
}

Counters Totals::counters() const {
  const auto link = [this](Link which) {
    const OfLink& of = links[static_cast<std::size_t>(which)];
    return LinkCounters{.copies = of.copies, .bytes = of.bytes, .busy_ns = of.busy};
  };
  return {.h2d = link(Link::kHostToDevice),
          .d2h = link(Link::kDeviceToHost),
          .peer = link(Link::kPeer),
          .kernels = kernels,
          .kernel_busy_ns = kernel_busy,
          .stall_ns = stall,
          .launch_bound_ns = launch_bound,
          .host_wait_ns = host_wait,
          .host_waits = host_waits,
          .memory_waits = memory_waits,
          .adopted = adopted,
          .drains = drains,
          .drain_wait_ns = drain_wait_ns,
          .threads = threads};
}

Counters Engine::counters(int device) const {
  MutexLock lock(mutex_);
  return devices_[static_cast<std::size_t>(checked(device))].totals.counters();
}

void Engine::reset_counters(int device) {
  MutexLock lock(mutex_);
  Totals& totals = device_at(checked(device)).totals;
  totals = Totals{.threads = totals.threads};
}

void Engine::set_recorder(trace::Recorder* recorder) {
  MutexLock lock(mutex_);
  recorder_ = recorder;
}

// ---- tests and the end
// --------------------------------------------------------------------------------------------------

void Engine::pause(int device, Link link) {
  if (gate(checked(device), link).pause()) paused_links_.fetch_add(1, std::memory_order_relaxed);
}

void Engine::resume(int device, Link link) {
  if (gate(checked(device), link).resume()) paused_links_.fetch_sub(1, std::memory_order_relaxed);
}

void Engine::throw_stuck() const {
  throw InternalError(internal::concat("[sim] a wait expected queued copies to go on; found a paused link for ",
                                       std::chrono::duration<double>(patience_).count(),
                                       " s; resume the link before waiting for its copies"));
}

void Engine::stop_workers() noexcept {
  std::vector<Stream*> streams;
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    for (const auto& stream : by_index_) streams.push_back(stream.get());
  }
  for (auto& of_device : gates_)
    for (LinkGate& gate : of_device)
      if (gate.resume()) paused_links_.fetch_sub(1, std::memory_order_relaxed);
  for (Stream* stream : streams) stream->queue_.stop();
}

}  // namespace neap::sim
