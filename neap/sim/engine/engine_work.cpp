// torch-free
#include <algorithm>
#include <cstring>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/sim/engine/engine.h"
#include "neap/trace/recorder.h"

namespace neap::sim {
namespace {

// Bytes that are moved sooner than a worker is woken to move them.
constexpr std::size_t kFew = 32768;
constexpr Nanoseconds kPoll = 1'000;  // host time of one query: a loop that polls must come to an end

using SteadyClock = std::chrono::steady_clock;

int64_t nanoseconds(SteadyClock::time_point time) { return time.time_since_epoch() / std::chrono::nanoseconds(1); }

const char* lane(Link link) {
  switch (link) {
    case Link::kHostToDevice:
      return "copies in";
    case Link::kDeviceToHost:
      return "copies out";
    case Link::kPeer:
      return "copies between devices";
  }
  return "";
}

}  // namespace

// ---- virtual time
// -----------------------------------------------------------------------------------------------------

// Starts one submission: it costs host time, what the host knows is ordered before it, and it gets a number.
void Engine::open(Stream* stream, Nanoseconds host_cost) {
  Host& by = host();
  by.time(stream->device()) += host_cost;
  if (!config_.hazard_check) return;
  if (stream->host_version_ != by.version) {
    stream->seen_.merge(by.seen);
    stream->host_version_ = by.version;
  }
  stream->seen_.set(stream->index_, ++stream->number_);
}

Engine::Slot Engine::place(const Stream* stream) {
  const Nanoseconds ready = std::max(stream->free_at_, host().time(stream->device()));
  return {ready, std::max(ready, stream->barrier_)};
}

// Accounts for what kept the stream from running the work earlier.
void Engine::begin_work(Stream* stream, Slot slot) {
  if (stream->id() == 0) {
    Totals& totals = device_at(stream->device()).totals;
    totals.launch_bound += slot.ready - stream->free_at_;
    totals.stall += slot.start - slot.ready;
  }
  if (recorder_ != nullptr && config_.clock == Clock::kVirtual && slot.start > slot.ready)
    recorder_->span(stream->track_, "wait", slot.ready, slot.start);
}

void Engine::host_learns(const VectorClock& seen) {
  Host& by = host();
  if (by.seen.merge(seen)) by.version = ++host_version_;
}

void Engine::host_waits(int device, Nanoseconds until, const char* what) {
  Nanoseconds& now = host().time(device);
  if (until <= now) return;
  Totals& totals = device_at(device).totals;
  totals.host_wait += until - now;
  ++totals.host_waits;
  if (recorder_ != nullptr && config_.clock == Clock::kVirtual)
    recorder_->span(internal::concat("sim:", device, "/host"), what, now, until);
  now = until;
}

// ---- kernels and copies
// -----------------------------------------------------------------------------------------------

void Engine::begin_kernel(Stream* on, std::span<const Range> ranges, const char* what, KernelCost cost) {
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (quiet(on)) {
        open(on, costs_.launch);
        if (config_.hazard_check) check(on, ranges, what);
        const Slot slot = place(on);
        begin_work(on, slot);
        const Nanoseconds duration = costs_.kernel(cost);
        on->free_at_ = slot.start + duration;
        Totals& totals = device_at(on->device()).totals;
        ++totals.kernels;
        totals.kernel_busy += duration;
        if (recorder_ != nullptr && config_.clock == Clock::kVirtual)
          recorder_->span(on->track_, what, slot.start, on->free_at_);
        return;
      }
    }
    drain(on);
  }
}

Nanoseconds Engine::account_copy(Stream* on, Link link, std::size_t bytes, std::span<const Range> ranges,
                                 const char* what, int latencies, const Drawn& drawn) {
  open(on, costs_.launch);
  if (config_.hazard_check) check(on, ranges, what);
  const Slot slot = place(on);
  begin_work(on, slot);
  Device& device = device_at(on->device());
  const Nanoseconds duration = costs_.copy(link, bytes, latencies);
  const Nanoseconds start = device.links[static_cast<std::size_t>(link)].reserve(slot.start, duration);
  on->free_at_ = start + duration;
  Totals::OfLink& totals = device.totals.links[static_cast<std::size_t>(link)];
  ++totals.copies;
  totals.bytes += static_cast<int64_t>(bytes);
  totals.busy += duration;
  if (recorder_ != nullptr && config_.clock == Clock::kVirtual) {
    const std::string track =
        drawn.track.empty() ? internal::concat("sim:", on->device(), "/", lane(link)) : std::string(drawn.track);
    recorder_->span(track, drawn.name.empty() ? what : drawn.name, start, on->free_at_,
                    {{"bytes", bytes}, {"stream", on->id()}});
  }
  return duration;
}

void Engine::submit_copy(Stream* on, Link link, std::size_t bytes, std::span<const Range> ranges, const char* what,
                         std::function<void()> work, Wait wait, int latencies, Drawn drawn) {
  // A copy that the host waits for anyhow needs no worker: once the stream is quiet, this thread does it.
  bool inline_copy = wait == Wait::kForCompletion;
  if (inline_copy) wait_until_quiet(on);
  std::chrono::nanoseconds real_duration{0};
  {
    MutexLock lock(mutex_);
    const Nanoseconds duration = account_copy(on, link, bytes, ranges, what, latencies, drawn);
    if (config_.realtime_copies && costs_.limited(link)) real_duration = std::chrono::nanoseconds(duration);
    inline_copy |= stopped_;
    if (!inline_copy) {
      push(on, Task{.work = copy_task(on, link, ranges, what, std::move(work), real_duration)});
      return;
    }
  }
  if (!gate(on->device(), link).pass(work, real_duration, patience_)) throw_stuck();
  if (wait == Wait::kForCompletion) synchronize(on);
}

void Engine::submit_copy(Stream* on, Link link, Move move, std::span<const Range> ranges, const char* what, Wait wait) {
  if (wait == Wait::kNo && move.bytes <= kFew) {
    MutexLock lock(mutex_);
    // Under the lock, because until the bytes are there nobody else may find the stream quiet.
    if (copies_at_once(on)) {
      account_copy(on, link, move.bytes, ranges, what, /*latencies=*/1, {});
      std::memcpy(move.to, move.from, move.bytes);
      return;
    }
  }
  const auto work = [move] { std::memcpy(move.to, move.from, move.bytes); };
  submit_copy(on, link, move.bytes, ranges, what, work, wait);
}

// On the virtual clock alone: where real time counts, copies overlap compute for real.
bool Engine::copies_at_once(Stream* on) {
  return config_.clock == Clock::kVirtual && !config_.realtime_copies && !any_paused() && quiet(on);
}

void Engine::submit_host_task(Stream* on, HostTask task) {
  std::vector<Range> ranges;
  {
    MutexLock lock(mutex_);
    for (const auto& [data, bytes, write] : task.ranges) {
      auto* block = const_cast<Block*>(find_block(data));
      if (block == nullptr) continue;
      const auto begin =
          static_cast<std::size_t>(static_cast<const char*>(data) - static_cast<const char*>(block->data()));
      ranges.push_back({block, begin, begin + static_cast<std::size_t>(bytes), write});
    }
  }
  submit_copy(on, Link::kPeer, static_cast<std::size_t>(task.wire_bytes.count), ranges, task.what, std::move(task.work),
              Wait::kNo, task.latencies, {task.track, task.label});
}

// The copy as the worker runs it. It keeps the memory on both sides alive.
std::function<void()> Engine::copy_task(Stream* on, Link link, std::span<const Range> ranges, const char* what,
                                        std::function<void()> work, std::chrono::nanoseconds duration) {
  std::vector<Block*> held;
  for (const Range& range : ranges)
    if (range.block != nullptr && range.block->live_) held.push_back(range.block);
  for (Block* block : held) BlockStore::retain(block);
  trace::Recorder* recorder = config_.clock == Clock::kReal ? recorder_ : nullptr;
  return [this, on, link, what, duration, recorder, work = std::move(work), held = std::move(held)] {
    ScopeExit release([&] {
      for (Block* block : held) blocks_.release(block);
    });
    const auto begin = SteadyClock::now();
    gate(on->device(), link).pass(work, duration, std::chrono::nanoseconds(0));
    if (recorder != nullptr)
      recorder->span(internal::concat("sim:", on->device(), "/", lane(link)), what, nanoseconds(begin),
                     nanoseconds(SteadyClock::now()));
  };
}

// ---- the real queue
// ---------------------------------------------------------------------------------------------------

bool Engine::quiet(Stream* stream) {
  std::erase_if(stream->waits_, [](const auto& recording) { return recording->done(); });
  return stream->waits_.empty() && stream->queue_.idle();
}

void Engine::push(Stream* stream, Task task) {
  if (task.record != nullptr && (stopped_ || quiet(stream))) {
    using enum Recording::RealTime;
    return task.record->finish_unseen(config_.clock == Clock::kReal ? kTaken : kNotAsked);
  }
  TaskQueue& queue = stream->queue_;
  bool started = false;
  for (auto& recording : stream->waits_) started |= queue.push(Task{.wait_for = std::move(recording)});
  stream->waits_.clear();
  started |= queue.push(std::move(task));
  if (started) ++device_at(stream->device()).totals.threads;
}

void Engine::wait_until_quiet(Stream* stream) {
  {
    MutexLock lock(mutex_);
    if (quiet(stream)) return;
  }
  while (!stream->queue_.wait_idle(patience_))
    if (any_paused()) throw_stuck();
  std::vector<std::shared_ptr<const Recording>> waits;
  {
    MutexLock lock(mutex_);
    waits = stream->waits_;
  }
  for (const auto& recording : waits) wait_for(*recording);
  stream->queue_.rethrow_failure();
}

void Engine::wait_for(const Recording& recording) const {
  while (!recording.wait_for(patience_))
    if (any_paused()) throw_stuck();
}

void Engine::drain(Stream* stream) {
  {
    MutexLock lock(mutex_);
    if (quiet(stream)) return;
  }
  const auto begin = SteadyClock::now();
  wait_until_quiet(stream);
  MutexLock lock(mutex_);
  Totals& totals = device_at(stream->device()).totals;
  ++totals.drains;
  totals.drain_wait_ns += nanoseconds(SteadyClock::now()) - nanoseconds(begin);
}

void Engine::synchronize(Stream* stream) {
  wait_until_quiet(stream);
  MutexLock lock(mutex_);
  host_waits(stream->device(), std::max(stream->free_at_, stream->barrier_), "synchronize stream");
  host_learns(stream->seen_);
}

void Engine::synchronize_device(int device) {
  for (const auto& slot : streams_[static_cast<std::size_t>(checked(device))])
    if (Stream* stream = slot.load(std::memory_order_acquire)) synchronize(stream);
}

bool Engine::query(Stream* stream) {
  stream->queue_.rethrow_failure();
  {
    MutexLock lock(mutex_);
    if (config_.clock == Clock::kVirtual) {
      Nanoseconds& now = host().time(stream->device());
      now += kPoll;
      if (std::max(stream->free_at_, stream->barrier_) > now) return false;
      if (!quiet(stream) && any_paused()) return false;
    } else if (!quiet(stream)) {
      return false;
    }
  }
  wait_until_quiet(stream);
  MutexLock lock(mutex_);
  host_learns(stream->seen_);
  return true;
}

// ---- events
// -----------------------------------------------------------------------------------------------------------

std::shared_ptr<Recording> Engine::make_recording(Stream* stream) {
  return std::make_shared<Recording>(stream->device(), place(stream).start,
                                     config_.hazard_check ? stream->seen_ : VectorClock());
}

bool Engine::reached(const Recording& recording) {
  return config_.clock == Clock::kVirtual ? recording.time <= host().time(recording.device) : recording.done();
}

void Engine::record(Event& event, Stream* on) {
  MutexLock lock(mutex_);
  open(on, costs_.event);
  auto recording = make_recording(on);
  event.latest_ = recording;
  push(on, Task{.record = std::move(recording)});
}

void Engine::wait(Stream* stream, const Event& event) {
  MutexLock lock(mutex_);
  if (event.latest_ == nullptr) return;
  open(stream, costs_.event);
  stream->barrier_ = std::max(stream->barrier_, event.latest_->time);
  if (config_.hazard_check) stream->seen_.merge(event.latest_->seen);
  std::erase_if(stream->waits_, [](const auto& recording) { return recording->done(); });
  if (!event.latest_->done()) stream->waits_.push_back(event.latest_);
}

bool Engine::query(const Event& event) {
  std::shared_ptr<const Recording> latest;
  {
    MutexLock lock(mutex_);
    if (event.latest_ == nullptr) return true;
    const Recording& recording = *event.latest_;
    if (config_.clock == Clock::kVirtual) host().time(recording.device) += kPoll;
    if (!reached(recording) || (!recording.done() && any_paused())) return false;
    host_learns(recording.seen);
    if (recording.done()) return true;
    latest = event.latest_;
  }
  wait_for(*latest);
  return true;
}

void Engine::synchronize(const Event& event) {
  std::shared_ptr<const Recording> latest;
  {
    MutexLock lock(mutex_);
    latest = event.latest_;
  }
  if (latest == nullptr) return;
  wait_for(*latest);
  MutexLock lock(mutex_);
  host_waits(latest->device, latest->time, "synchronize event");
  host_learns(latest->seen);
}

double Engine::elapsed_ms(const Event& from, const Event& to) {
  MutexLock lock(mutex_);
  for (const Event* event : {&from, &to})
    NEAP_CHECK(event->latest_ != nullptr && reached(*event->latest_) && event->latest_->done(),
               "[sim] elapsed time expects two events that were recorded and are complete; found one that ",
               event->latest_ == nullptr ? "was never recorded" : "is not complete; synchronize it first");
  if (config_.clock == Clock::kVirtual) return static_cast<double>(to.latest_->time - from.latest_->time) * 1e-6;
  return std::chrono::duration<double, std::milli>(to.latest_->finished_at() - from.latest_->finished_at()).count();
}

}  // namespace neap::sim
