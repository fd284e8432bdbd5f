#include "neap/offload/engine_state.h"

#include <algorithm>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/trace/recorder.h"

namespace neap::offload {
namespace {

// Where the windows start. Small against the activations of one unit of a large model, so that the first step does not
// need memory that the later ones can do without; they widen as soon as that is too little.
constexpr Bytes kFirstWindow{int64_t{16} << 20};
// A timetable is made anew after so many passes even if nothing has stalled.
constexpr int64_t kTimedEvery = 16;
constexpr Bytes kNoLimit{int64_t{1} << 60};

// A pool takes no larger one.
std::optional<Bytes> host_limit(const Options& options) {
  return options.host_limit ? std::optional(std::min(*options.host_limit, kNoLimit)) : std::nullopt;
}

// A pool with a limit must be able to use it: slabs that are small against it.
Bytes slab_size(const Options& options) {
  const Bytes usual = memory::HostPool::Options{}.slab_size;
  if (!options.host_limit) return usual;
  return std::clamp(Bytes(options.host_limit->count / 16), Bytes(memory::kGranularity), usual);
}

}  // namespace

EngineState::EngineState(Options chosen, Resources resources)
    : options(std::move(chosen)),
      pool_(std::move(resources.pool)),
      recorder_(resources.recorder),
      release_window_(kFirstWindow, options.max_in_flight),
      reload_window_(kFirstWindow, kNoLimit) {}

void EngineState::set_model(const std::vector<at::Tensor>& parameters_and_buffers, ListTensors list_again) {
  const MutexLock lock(mutex);
  remember(parameters_and_buffers);
  list_again_ = std::move(list_again);
  stopped_ = false;
}

void EngineState::remember(const std::vector<at::Tensor>& tensors) {
  model_.clear();
  for (const at::Tensor& tensor : tensors) model_.emplace_back(tensor.getIntrusivePtr());
}

void EngineState::refresh_model(int32_t unit) {
  ListTensors list;
  {
    const MutexLock lock(mutex);
    const auto current = of_this_thread();
    if (!list_again_ || (current != current_.end() && !begins_pass(**current, unit))) return;
    if (std::ranges::none_of(model_, [](const auto& weak) { return weak.expired(); })) return;
    list = list_again_;
  }
  const std::vector<at::Tensor> tensors = list();
  const MutexLock lock(mutex);
  remember(tensors);
}

EngineState::Threads::iterator EngineState::of_this_thread() {
  return std::ranges::find(current_, std::this_thread::get_id(), &Tape::thread);
}

// A unit that runs again begins another pass, and so does any unit after backward has begun.
bool EngineState::begins_pass(const Tape& tape, int32_t unit) { return tape.turned() || tape.has_run(unit); }

int32_t EngineState::add_unit(std::string name) {
  const MutexLock lock(mutex);
  units_.push_back({std::move(name)});
  return static_cast<int32_t>(units_.size()) - 1;
}

void EngineState::stop() {
  const MutexLock lock(mutex);
  stopped_ = true;
  current_.clear();
}

void EngineState::disconnect() {
  const MutexLock lock(mutex);
  recorder_ = nullptr;
}

bool EngineState::active() {
  const MutexLock lock(mutex);
  return !stopped_;
}

void EngineState::adopt_device(c10::Device device) {
  const MutexLock lock(mutex);
  adopted_device_ = device;
}

std::shared_ptr<Tape> EngineState::enter(int32_t unit, const std::shared_ptr<Tape>& within) {
  const EngineLock lock(*this);
  if (stopped_) return nullptr;
  if (within != nullptr) return within;  // a unit inside a unit is part of its run
  auto current = of_this_thread();
  if (current == current_.end() || begins_pass(**current, unit)) {
    if (current != current_.end()) {
      current_.erase(current);
    } else {
      // Passes of threads that have gone, and of others that nothing belongs to yet.
      std::erase_if(current_, [](const auto& tape) { return tape.use_count() == 1; });
    }
    auto begun = begin_pass();
    if (begun == nullptr) return nullptr;
    current = current_.insert(current_.end(), std::move(begun));
  }
  Tape& tape = **current;
  tape.begin_run(unit);
  ++run_;
  look({Piece::Kind::kForward, unit});
  Moment now = tape.link().now();
  settle(now);
  return *current;
}

void EngineState::leave(int32_t unit, int64_t begin_ns, int64_t saved, int64_t kept) noexcept {
  const MutexLock lock(mutex);
  if (link_ == nullptr) return;
  report.saved_tensors += saved;
  report.kept_tensors += kept;
  look({Piece::Kind::kAfterForward, unit});
  if (recorder_ == nullptr) return;
  const auto& name = units_[static_cast<size_t>(unit)].name;
  const int64_t now = link_->device().now_ns();
  recorder_->span("offload/forward", name, begin_ns, now, {{"saved", saved}, {"kept", kept}});
  recorder_->counter("offload/bytes", "in flight", now, static_cast<double>(in_flight_.bytes().count));
  recorder_->counter("offload/bytes", "away", now, static_cast<double>(ledger.away.count));
}

std::shared_ptr<Tape> EngineState::begin_pass() {
  refresh_device();
  if (link_ == nullptr) return nullptr;
  end_measuring();
  // With a timetable that serves there is time for it in backward, when the host is ahead of the device.
  if (timetable_ == nullptr || times_wanted_) learn();
  departure_ = Departure(tail(), learned_);
  by_timetable_ = timetable_ != nullptr;
  // Times cost a little; a timetable that serves needs no new ones for a while.
  const bool timed =
      automatic() && link_->overlaps() && (!by_timetable_ || times_wanted_ || passes_ % kTimedEvery == 0);
  if (timed) times_wanted_ = false;
  return std::make_shared<Tape>(shared_from_this(), link_, ++passes_, expected_length_, timetable_, timed);
}

// The model may have been moved, and its parameters may lie in other storages than at the last pass (`module.to()`,
// sharding); what lay where they were is no longer special, but nothing is saved from it either.
void EngineState::refresh_device() {
  std::optional<c10::Device> device;  // a parameter's, else the adopted one
  for (const auto& weak : model_) {
    const auto impl = weak.lock();
    if (!impl) continue;
    const at::Tensor tensor(impl);
    residents.add(tensor);
    if (!device || (device->is_cpu() && !tensor.is_meta())) device = tensor.device();
  }
  if (!device) device = adopted_device_;
  if (!device) return;
  auto& found = device::Device::of(*device);
  if (link_ != nullptr && &link_->device() == &found) return;
  link_ = std::make_shared<Link>(found, options.mode == Mode::kAsync);
  if (pool_ == nullptr || (own_pool_ && pool_->options().device != found.c10_device())) {
    own_pool_ = true;
    pool_ = std::make_shared<memory::HostPool>(
        memory::HostPool::Options{.slab_size = slab_size(options),
                                  .cache_limit = std::min(options.host_cache_limit, kNoLimit),
                                  .host_limit = host_limit(options),
                                  .pin = options.pin,
                                  .device = found.c10_device()});
  }
}

// What is measured from now on belongs to another pass.
void EngineState::end_measuring() {
  link_->out_stalls().end_pass(by_timetable_);
  link_->in_stalls().end_pass(by_timetable_);
}

// What the passes that were measured have shown by now. Each event that is read takes the host a microsecond or so.
void EngineState::learn() {
  const auto from = [this](StallMeter& stalls, LinkRate& rate, AdaptiveWindow& window, Slack& slack, PassTimes& times) {
    bool news = false;
    while (auto pass = stalls.next_pass()) {
      if (pass->by_timetable) {
        slack.learn(pass->waits);
      } else {
        window.learn(pass->waits, rate.ns_per_byte());
      }
      times_wanted_ = times_wanted_ || pass->waits.stalled();
      if (pass->points.empty()) continue;
      times = *std::move(pass);
      news = true;
    }
    return news;
  };
  const bool out_news = from(link_->out_stalls(), link_->out_rate(), release_window_, out_slack_, out_times_);
  const bool in_news = from(link_->in_stalls(), link_->in_rate(), reload_window_, in_slack_, in_times_);
  if (out_news || in_news) make_timetable();
}

void EngineState::make_timetable() {
  const auto out = link_->out_rate().ns_per_byte();
  const auto in = link_->in_rate().ns_per_byte();
  if (!out || !in || out_times_.pass != in_times_.pass || !out_times_.complete || !in_times_.complete) return;
  const auto length = static_cast<int64_t>(expected_length_);
  std::vector<SaveTime> saves;
  for (const Point& point : out_times_.points) {
    if (point.place != static_cast<int64_t>(saves.size())) return;
    saves.push_back({point.at_ns, point.bytes});
  }
  std::vector<UseTime> uses;
  for (const Point& point : in_times_.points) {
    if (point.place >= length) return;
    uses.push_back({point.at_ns, point.bytes, point.place});
  }
  auto table = Timetable::make(saves, uses, length, {*out, out_slack_.ns()}, {*in, in_slack_.ns()});
  timetable_ = table ? std::make_shared<const Timetable>(*std::move(table)) : nullptr;
}

// The pass is another than the one it was made for.
void EngineState::drop_timetable(Tape& tape) {
  tape.drop_timetable();
  by_timetable_ = false;
  times_wanted_ = true;
}

Departure::Tail EngineState::tail() const {
  const bool learned = automatic() && !options.keep_last && link_->overlaps();
  if (!learned) {
    // The last unit of one would be all there is.
    const int one = units_.size() > 1 ? 1 : 0;
    return {.keep_runs = options.keep_last.value_or(one), .keep_bytes = options.device_budget};
  }
  if (timetable_ != nullptr) return {.keep_runs = 0, .keep_bytes = std::max(options.device_budget, timetable_->tail())};
  // Long enough for reloads to get ahead of backward, and for everything before it to have left when backward begins.
  return {.keep_runs = 0, .keep_bytes = std::max({options.device_budget, reload_window_.size(), release_window()})};
}

void EngineState::after_units(uint64_t call) {
  const EngineLock lock(*this);
  const auto current = of_this_thread();
  if (current == current_.end() || (*current)->turned()) return;
  std::erase_if(waypoints_, [](const Waypoint& waypoint) { return waypoint.tape.expired(); });
  waypoints_.push_back({call, *current, (*current)->add_waypoint()});
}

void EngineState::before_units(uint64_t call) {
  const EngineLock lock(*this);
  const auto waypoint = std::ranges::find(waypoints_, call, &Waypoint::call);
  if (waypoint == waypoints_.end()) return;
  if (const auto tape = waypoint->tape.lock()) tape->come_by(waypoint->position);
}

void EngineState::came_to(Tape& tape, int64_t number, Bytes size, Moment& now) {
  if (tape.timed()) tape.link().out_stalls().add_point(now.event(), size, tape.number(), number);
  if (tape.timetable() != nullptr && !tape.timetable()->expects(number, size)) drop_timetable(tape);
}

void EngineState::saved(SavedStorage& storage, Tape& tape, Moment& now) {
  units_[static_cast<size_t>(storage.unit())].hit = true;
  if (tape.bytes().count == 0) ++report.passes;
  came_to(tape, storage.number, storage.size(), now);
  report.saved_bytes += storage.size();
  saved_ += storage.size();
  if (departure_.leaves_at_once(tape.runs() - 1, tape.bytes(), storage.size())) {
    launch(storage, now);
  } else {
    waiting_.push(storage);
  }
  settle(now);
}

// Its use in backward has come nearer to the end of the pass.
void EngineState::saved_again(SavedStorage& storage, Tape& tape, int32_t unit) {
  // The timetable ends where the pass did when its backward began.
  if (tape.turned() && tape.timetable() != nullptr) drop_timetable(tape);
  units_[static_cast<size_t>(unit)].hit = true;
  if (waiting_.contains(storage)) {
    waiting_.remove(storage);
    waiting_.push(storage);
  } else if (departure_.surely_in_tail(tape.runs() - 1)) {
    // On its way out, or out already, but it will be needed first: its bytes on the host will not be asked for.
    in_flight_.remove(storage);
    if (storage.state() == StorageState::kHost) storage.forward();
  }
}

void EngineState::settle(Moment& now) {
  while (SavedStorage* oldest = waiting_.front()) {
    if (!departure_.must_leave(run_ - oldest->run, waiting_.bytes())) break;
    waiting_.remove(*oldest);
    launch(*oldest, now);
  }
  relieve(now);
}

void EngineState::launch(SavedStorage& storage, Moment& now) {
  auto buffer = pool_->try_acquire(storage.size());
  if (!buffer) {
    storage.keep();
    if (!std::exchange(warned_of_host_limit_, true)) {
      log_warning("[offload.host_limit] no host memory for another ", storage.size(),
                  " (held now: ", pool_->counters().locked,
                  "); saved tensors stay on the device until some comes back");
    }
    return;
  }
  storage.copy_out(storage.tape()->link(), *std::move(buffer), now);
  report.offloaded_bytes += storage.size();
  ++report.offloaded_storages;
  storage.saved_before = saved_ - storage.size();
  if (storage.state() == StorageState::kCopyingOut) in_flight_.push(storage);
}

// Copies are let go in the order they were begun, each where it should be over; then the compute stream waits for it.
// Where no timetable foretells that, it is when so much has been saved since, whatever becomes of that. Before, it is
// worth asking now and then whether it has arrived: asking is not free either.
void EngineState::relieve(Moment& now) {
  while (SavedStorage* oldest = in_flight_.front()) {
    const Tape& tape = *oldest->tape();
    const Timetable* timetable = tape.timetable();
    const int64_t out_by = timetable != nullptr ? timetable->out_by(oldest->number) : Timetable::kNever;
    const bool foretold = out_by != Timetable::kNever;
    const int64_t window = (timetable != nullptr ? timetable->in_flight() : release_window()).count;
    const int64_t since = (saved_ - oldest->saved_before).count;
    const bool over =
        in_flight_.bytes() > options.max_in_flight || (foretold ? out_by < tape.storages_saved() : since > window);
    if (!over && (foretold || 2 * since < window || !oldest->copied().query())) break;
    if (over) tape.link().out_stalls().add_wait(now.event(), oldest->copied(), oldest->size());
    in_flight_.remove(*oldest);
    oldest->release(over ? SavedStorage::Copy::kUnderWay : SavedStorage::Copy::kDone);
  }
}

void EngineState::leave_queues(SavedStorage& storage) {
  waiting_.remove(storage);
  in_flight_.remove(storage);
}

void EngineState::begin_backward(int32_t unit) {
  const MutexLock lock(mutex);
  look({Piece::Kind::kBackward, unit});
}

void EngineState::end_backward(int32_t unit) {
  const MutexLock lock(mutex);
  look({Piece::Kind::kAfterBackward, unit});
}

// Backward has come to the pass: this is how long it was, and now it shows what offload has done for it.
void EngineState::turned(Tape& tape) {
  const Timetable* timetable = tape.timetable();
  if (timetable != nullptr &&
      (timetable->length() != static_cast<int64_t>(tape.length()) || timetable->storages() != tape.storages_saved())) {
    drop_timetable(tape);
  }
  learn();
  learned_ = PassShape{tape.runs(), tape.bytes()};
  expected_length_ = tape.length();
  Bytes left, freed;
  std::vector<Bytes> held(units_.size());
  tape.for_each_storage([&](const SavedStorage& storage) {
    if (storage.state() != StorageState::kHost) return;
    left += storage.size();
    if (storage.key().identity.expired()) {
      freed += storage.size();
    } else {
      held[static_cast<size_t>(storage.unit())] += storage.size();
    }
  });
  if (left < report.planned_drop) return;  // the report is about the largest pass
  report.planned_drop = left;
  report.measured_drop = freed;
  report.stayed_bytes = tape.bytes() - left;
  report.still_referenced.clear();
  for (size_t i = 0; i < held.size(); ++i) {
    if (held[i].count > 0) report.still_referenced.push_back({units_[i].name, held[i]});
  }
  if (const auto stats = link_->device().memory_stats()) report.allocated_at_turn = stats->allocated;
}

void EngineState::reloaded(const SavedStorage& storage, bool late) {
  report.reloaded_bytes += storage.size();
  ++report.reloaded_storages;
  if (!late) return;
  ++report.late_reloads;
  if (recorder_ == nullptr) return;
  recorder_->instant("offload/late reloads", units_[static_cast<size_t>(storage.unit())].name,
                     storage.tape()->link().device().now_ns(), {{"bytes", storage.size()}});
}

Prefetcher::Reach EngineState::reach(int64_t run) const {
  if (const auto* layers = std::get_if<Layers>(&options.prefetch)) {
    if (layers->count == 0) return {.bytes = Bytes(0)};
    return {.first_run = run - layers->count};
  }
  if (const auto* bytes = std::get_if<Bytes>(&options.prefetch)) return {.bytes = *bytes};
  return {.bytes = reload_window_.size()};
}

bool EngineState::has_room(Bytes size) const {
  if (!options.device_limit) return true;
  const auto stats = link_->device().memory_stats();
  return !stats || stats->allocated + size <= *options.device_limit;
}

void EngineState::look(Piece next) {
  if (link_ == nullptr) return;
  if (const auto stats = link_->device().memory_stats()) peak_.look(stats->allocated_peak, ledger.away, next);
}

std::string EngineState::words(Piece piece) const {
  using enum Piece::Kind;
  if (piece.kind == kOutside) return "outside of the units";
  const std::string& unit = units_[static_cast<size_t>(piece.unit)].name;
  switch (piece.kind) {
    case kForward:
      return "in the forward of " + unit;
    case kAfterForward:
      return "after the forward of " + unit;
    case kBackward:
      return "in the backward of " + unit;
    default:
      return "after the backward of " + unit;
  }
}

StepReport EngineState::take_report() {
  const EngineLock lock(*this);
  if (link_ != nullptr) {
    end_measuring();
    learn();
    report.exposed_wait_ns += link_->out_stalls().take_exposed_ns() + link_->in_stalls().take_exposed_ns();
    look({});
    if (const auto stats = link_->device().memory_stats()) {
      report.device_peak = stats->allocated_peak;
      report.peak_piece = words(peak_.at_peak());
      report.away_at_peak = peak_.away();
    }
  }
  for (Unit& unit : units_) {
    if (!std::exchange(unit.hit, false) && report.saved_tensors > 0) report.never_hit.push_back(unit.name);
  }
  if (pool_ != nullptr) {
    const memory::PoolCounters host = pool_->counters();
    report.host_bytes = host.requested;
    report.host_locked = host.locked;
    report.host_locked_peak = host.locked_peak;
  }
  report.prefetch_window = timetable_ != nullptr ? timetable_->ahead() : reach(0).bytes;
  report.in_flight_window = timetable_ != nullptr ? timetable_->in_flight() : release_window();
  return std::exchange(report, {});
}

memory::PoolCounters EngineState::host_counters() {
  const EngineLock lock(*this);
  return pool_ == nullptr ? memory::PoolCounters{} : pool_->counters();
}

}  // namespace neap::offload
