#include "neap/comm/internal/group_core.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "neap/base/scope_exit.h"
#include "neap/device/device.h"
#include "neap/device/host_task.h"
#include "neap/trace/recorder.h"

namespace neap::comm::internal {
namespace {

using neap::internal::concat;
using SteadyClock = std::chrono::steady_clock;

int64_t steady_ns() { return SteadyClock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

int index_of(const std::vector<int>& ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  NEAP_ASSERT(found != ranks.end(), "rank ", rank, " makes a group that it is no member of");
  return static_cast<int>(found - ranks.begin());
}

// "ranks 0, 1, 5", "ranks 0 to 16383"
std::string list(const std::vector<int>& ranks) {
  constexpr size_t kShown = 8;
  if (ranks.size() > kShown) return concat(ranks.size(), " ranks from ", ranks.front(), " to ", ranks.back());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += concat(i > 0 ? ", " : "", ranks[i]);
  return text;
}

}  // namespace

GroupCore::GroupCore(std::shared_ptr<WorldCore> world, std::string name, std::vector<int> ranks)
    : world_(std::move(world)),
      name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(index_of(ranks_, world_->fabric().rank())) {
  host_lane_.suffix = "host";
  device_lane_.suffix = "device";
  if (size() > 1) connect(host_lane_);
}

GroupCore::~GroupCore() {
  wait_idle();
  for (Lane* lane : {&host_lane_, &device_lane_})
    if (lane->transport != nullptr) world_->remove(lane->transport.get());
  if (library_ != nullptr) world_->remove(library_.get());
}

void GroupCore::wait_idle() {
  MutexLock lock(mutex_);
  // Ends within the timeout: the watchdog sees to it.
  idle_.wait(mutex_, [&] { return outstanding_ == 0; });
}

// The ranks alone make the name: it is the same on all of them whatever they call the group.
std::string GroupCore::meeting(const char* suffix) const {
  return concat(ranks_.size(), ".", hash_bytes(std::as_bytes(std::span(ranks_))), ".", suffix);
}

void GroupCore::connect(Lane& lane) {
  lane.transport = world_->fabric().connect(meeting(lane.suffix), ranks_);
  world_->add(lane.transport.get());
}

void GroupCore::check_alive(Collective kind, std::string_view unit) const {
  if (world_->failed()) std::rethrow_exception(world_->failure(place(kind, unit), FailureKind::kRank, ""));
}

Counters GroupCore::counters() const {
  MutexLock lock(mutex_);
  Counters now = counters_;
  now.host_wait_ns = host_wait_ns_->load();
  return now;
}

void GroupCore::count(const Call& call) {
  MutexLock lock(mutex_);
  auto& of_kind = counters_.kinds[static_cast<size_t>(call.kind)];
  ++of_kind.calls;
  of_kind.bytes += call.bytes;
  counters_.copied += call.copied;
}

// ---- starting

Work GroupCore::start(Call call, c10::Device on) {
  auto& device = device::Device::of(on);
  if (device.asynchronous() && !device::has_host_task_launcher(on.type())) {
    return start_on_library(std::move(call), device);
  }
  count(call);
  return run_later(std::move(call), device);
}

// The library's calls carry no header. Whether the ranks agree is asked over the host's connections meanwhile; if they
// do not, or one is gone, that failure breaks the library's as well.
Work GroupCore::start_on_library(Call call, device::Device& device) {
  const c10::Device on = device.c10_device();
  if (library_ == nullptr && on.is_cuda()) {
    library_ = world_->fabric().connect_library(meeting("library"), ranks_);
    if (library_ != nullptr) world_->add(library_.get());
  }
  NEAP_CHECK(library_ != nullptr && on.is_cuda(), "[comm] ", to_string(call.kind), " among ", size(),
             " ranks expected tensors on the CPU or on sim; found ", on,
             ", for which this build has no transport (CUDA needs a torch with NCCL)");
  NEAP_CHECK(call.on_library, "[comm] ", to_string(call.kind), " of '", call.unit, "' on ", on,
             " expected equal pieces; found others; pad them");
  count(call);
  Call question;
  question.kind = call.kind;
  question.unit = call.unit;
  question.header = call.header;
  run_later(std::move(question), device::Device::of(c10::Device(c10::kCPU)));
  auto state = std::make_shared<WorkState>(std::move(call.memory), &device, host_wait_ns_);
  const auto stream = device.collective_stream();
  stream.wait(device.current_stream().record());
  {
    const c10::StreamGuard guard(stream.unwrap());
    call.on_library(*library_, world_->options().ordered);
  }
  state->finish_with(stream.record());
  return Work(std::move(state));
}

Work GroupCore::run_later(Call call, device::Device& device) {
  auto state =
      std::make_shared<WorkState>(std::move(call.memory), device.asynchronous() ? &device : nullptr, host_wait_ns_);
  Lane& lane = device.asynchronous() ? device_lane_ : host_lane_;
  call.header.number = lane.number++;
  HostTask task{.work = {},
                .what = to_string(call.kind),
                .ranges = std::move(call.ranges),
                .wire_bytes = call.wire_bytes,
                .latencies = call.latencies,
                .track = {},
                .label = {}};
  trace_start(call, device.asynchronous(), task);
  task.work = [this, &lane, state, call = std::make_shared<Call>(std::move(call))] { run(*call, lane, *state); };
  {
    MutexLock lock(mutex_);
    ++outstanding_;
  }
  ScopeExit not_started([this] { end_one(); });
  if (!device.asynchronous()) {
    worker_.push(std::move(task.work));
    not_started.dismiss();
    return Work(std::move(state));
  }
  const auto stream = device.collective_stream();
  stream.wait(device.current_stream().record());  // what the collective reads is there, what it writes is not in use
  device::launch_host_task(stream, std::move(task));
  not_started.dismiss();
  state->set_end(stream.record());
  return Work(std::move(state));
}

// ---- running, on the group's thread or a device's

void GroupCore::run(Call& call, Lane& lane, WorkState& state) noexcept {
  std::exception_ptr error;
  if (world_->failed()) {
    error = world_->failure(place(call.kind, call.unit), FailureKind::kRank, "");
  } else {
    const int64_t begin = steady_ns();
    error = attempt(call, lane);
    if (error == nullptr) trace_span(call, begin);
  }
  state.finish(std::move(error));
  end_one();
}

void GroupCore::end_one() noexcept {
  MutexLock lock(mutex_);
  --outstanding_;
  idle_.notify_all();
}

std::exception_ptr GroupCore::attempt(Call& call, Lane& lane) noexcept {
  const std::string where = place(call.kind, call.unit);
  auto kind = FailureKind::kRank;
  std::string own, too_late;
  try {
    lane.progress.waits_for = -1;
    lane.progress.agreed = false;
    const auto watch = world_->watchdog().watch(world_->options().timeout, [&] {
      too_late = concat(where, ": ", late(lane));
      world_->fail(FailureKind::kRank, too_late);
    });
    converse(call, lane);
    return nullptr;
  } catch (const Mismatch& mismatch) {
    kind = FailureKind::kMismatch;
    own = concat(where, ": ", mismatch.what());
  } catch (const PeerLost& lost) {
    own = concat(where, ": lost rank ", ranks_[static_cast<size_t>(lost.peer)], ", which died or left (", lost.what(),
                 "); see its log");
  } catch (const std::exception& failure) {
    own = concat(where, ": ", failure.what());
  }
  if (!too_late.empty()) own = too_late;  // the links broke because this rank cut them
  world_->fail(kind, own);
  const int peer = lane.progress.waits_for;
  const std::string waiting = peer < 0 ? "" : concat(", waiting for rank ", ranks_[static_cast<size_t>(peer)], ",");
  return world_->failure(where + waiting, kind, own);
}

void GroupCore::converse(Call& call, Lane& lane) {
  if (lane.transport == nullptr) connect(lane);
  Exchange exchange(*lane.transport, rank_, size(), lane.progress, lane.scratch);
  agree(exchange, call);
  if (call.body) call.body(exchange);
  MutexLock lock(mutex_);
  counters_.sent += Bytes(exchange.sent());
  counters_.received += Bytes(exchange.received());
}

void GroupCore::agree(Exchange& exchange, const Call& call) const {
  const auto headers = exchange.headers(call.header);
  for (size_t r = 0; r < headers.size(); ++r) {
    if (const auto differs = difference(call.header, headers[r]))
      throw Mismatch(concat("rank ", ranks_[r], " does something else: ", *differs,
                            "; every rank must call the same collectives in the same order"));
  }
}

// ---- words

std::string GroupCore::place(Collective kind, std::string_view unit) const {
  return concat("rank ", world_->fabric().rank(), ", ", to_string(kind), " of '", unit, "' in group '", name_, "' (",
                list(ranks_), ")");
}

std::string GroupCore::late(const Lane& lane) const {
  const double seconds = std::chrono::duration<double>(world_->options().timeout).count();
  const int peer = lane.progress.waits_for;
  if (peer < 0) return concat("the ranks did not connect within ", seconds, " s");
  return concat("waited ", seconds, " s for rank ", ranks_[static_cast<size_t>(peer)],
                lane.progress.agreed ? ", which began it and went no further"
                                     : ", which has not called it; if it is only slow, raise the timeout");
}

void GroupCore::trace_span(const Call& call, int64_t begin_ns) const {
  const WorldOptions& options = world_->options();
  if (options.recorder == nullptr || options.clock) return;
  options.recorder->span("comm/" + name_, concat(to_string(call.kind), " ", call.unit), begin_ns, steady_ns(),
                         {{"bytes", call.wire_bytes}});
}

void GroupCore::trace_start(const Call& call, bool on_device, HostTask& task) const {
  const WorldOptions& options = world_->options();
  if (options.recorder == nullptr || !options.clock) return;
  std::string track = "comm/" + name_, label = concat(to_string(call.kind), " ", call.unit);
  if (!on_device) return options.recorder->instant(track, label, options.clock(), {{"bytes", call.wire_bytes}});
  task.track = std::move(track);
  task.label = std::move(label);
}

}  // namespace neap::comm::internal
