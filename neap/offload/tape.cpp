#include "neap/offload/tape.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "neap/offload/engine_state.h"
#include "neap/offload/tensor_layout.h"

namespace neap::offload {

namespace {

size_t hash_of(const StorageKey& key) {
  return c10::hash_combine(key.identity.hash(), static_cast<size_t>(key.range.begin * 31 + key.range.end));
}

}  // namespace

TapeRoom::Arrays TapeRoom::take(size_t expected) {
  Arrays arrays;
  {
    const MutexLock lock(mutex_);
    arrays = std::exchange(kept_, {});
  }
  // Of a pass that was much longer: looking through its empty places would take longer than to make new ones.
  if (arrays.storages.buckets() > 8 * std::max<size_t>(expected, 64)) arrays = {};
  arrays.slots.reserve(expected);
  arrays.storages.reserve(expected);
  return arrays;
}

void TapeRoom::give_back(Arrays arrays) noexcept {
  arrays.slots.clear();
  const MutexLock lock(mutex_);
  std::swap(kept_, arrays);
}

Tape::Tape(std::shared_ptr<EngineState> engine, std::shared_ptr<Link> link, int64_t number, size_t expected,
           std::shared_ptr<const Timetable> timetable, bool timed)
    : engine_(std::move(engine)),
      link_(std::move(link)),
      number_(number),
      timed_(timed),
      arrays_(engine_->tape_room.take(expected)),
      timetable_(std::move(timetable)) {}

Tape::~Tape() { engine_->tape_room.give_back(std::move(arrays_)); }

void Tape::begin_run(int32_t unit) {
  const auto index = static_cast<size_t>(unit);
  if (units_run_.size() <= index) units_run_.resize(index + 1);
  units_run_[index] = true;
  ++runs_;
}

bool Tape::has_run(int32_t unit) const {
  const auto index = static_cast<size_t>(unit);
  return index < units_run_.size() && units_run_[index];
}

Place Tape::pack(const at::Tensor& tensor, int32_t unit) {
  const c10::Storage& storage = tensor.storage();
  const ByteRange whole{0, static_cast<int64_t>(storage.nbytes())};
  const ByteRange own = bytes_of(tensor);
  const bool takes_all = 2 * own.size() >= whole.size();

  std::unique_ptr<SavedStorage> created;  // if an exception comes, destroyed after the lock has been given back
  const EngineLock lock(*engine_);
  StorageKey key{autograd::StorageIdentity(tensor), whole};
  size_t hash = hash_of(key);
  SavedStorage* known = find(key, hash);
  if (known == nullptr && !takes_all) {
    // A small part of something large: only its own bytes travel.
    if (Bytes(own.size()) < engine_->options.min_bytes) return {};
    key.range = own;
    hash = hash_of(key);
    known = find(key, hash);
  }
  if (known != nullptr) {
    // Also this stream reads it, and perhaps still does when the one that saved it first is done with it.
    const device::Stream stream = link_->device().current_stream();
    if (link_->overlaps() && !(stream == known->home())) {
      link_->device().record_on_stream(storage.data_ptr(), stream);
    }
    engine_->saved_again(*known, *this, unit);
    return append(*known);
  }

  Moment now = link_->now();
  created =
      std::make_unique<SavedStorage>(shared_from_this(), std::move(key), storage, now.stream(), unit, engine_->ledger);
  created->run = engine_->run();
  created->number = storages_saved_++;
  arrays_.storages.insert(*created, hash);
  try {
    engine_->saved(*created, *this, now);
  } catch (...) {
    arrays_.storages.erase(*created);
    engine_->leave_queues(*created);
    created->retire();
    --storages_saved_;
    throw;
  }
  bytes_ += created->size();
  return append(*created.release());
}

SavedStorage* Tape::find(const StorageKey& key, size_t hash) const {
  return arrays_.storages.find(hash, [&key](const SavedStorage& storage) { return storage.key() == key; });
}

Place Tape::append(SavedStorage& storage) {
  storage.run = engine_->run();
  arrays_.slots.push_back({&storage, runs_ - 1});
  return {&storage, static_cast<int64_t>(arrays_.slots.size()) - 1, storage.join()};
}

int64_t Tape::add_waypoint() {
  Moment now = link_->now();
  const int64_t number = storages_saved_++;
  arrays_.slots.push_back({nullptr, runs_ - 1});
  engine_->came_to(*this, number, Bytes(0), now);
  engine_->settle(now);
  return static_cast<int64_t>(arrays_.slots.size()) - 1;
}

void Tape::turn() {
  if (!std::exchange(turned_, true)) engine_->turned(*this);
}

void Tape::come_by(int64_t waypoint) {
  if (!link_->overlaps()) return;
  turn();
  Moment now = link_->now();
  ScopeExit forget_loads([this] { loads_.clear(); });
  prefetch(waypoint);
  start_loads(now);
  if (timed_) link_->in_stalls().add_point(now.event(), Bytes(0), number_, waypoint);
}

Unpacked Tape::unpack(Place& place) {
  const EngineLock lock(*engine_);
  SavedStorage& storage = *place.storage;
  turn();
  Moment now = link_->now();
  {
    ScopeExit forget_loads([this] { loads_.clear(); });
    bring(storage);
    if (link_->overlaps()) {
      count_used(storage);
      prefetch(place.position);
    }
    start_loads(now);
  }
  note_use(storage, place.position, now);
  Unpacked result{storage.use(*link_, now), storage.origin()};
  storage.mark_used(place.used_generation);
  // Everyone who will need it in this backward has it: the tensors handed out keep it as long as they need it.
  if (storage.state() == StorageState::kReloaded && storage.all_used()) storage.drop();
  return result;
}

// Makes sure that the storage is on the device, or among what is about to be loaded.
void Tape::bring(SavedStorage& storage) {
  const StorageState state = storage.state();
  if (state != StorageState::kCopyingOut && state != StorageState::kHost) return;
  engine_->leave_queues(storage);
  if (storage.forward()) {
    ++engine_->report.forwarded_unpacks;
    return;
  }
  if (state == StorageState::kCopyingOut) storage.release(SavedStorage::Copy::kUnderWay);
  loads_.push_back({&storage, storage.allocate_target(*link_), StallMeter::Begun::kLate});
  const bool late = link_->overlaps();
  engine_->reloaded(storage, late);
  if (!late || held_back_in_sweep_ == prefetcher_.sweep()) return;
  engine_->want_times();
  // The first of a sweep cannot be early. Of the others one is lesson enough: all behind it may be late for one reason.
  if (fetched_in_sweep_ != prefetcher_.sweep()) return;
  if (std::exchange(late_in_sweep_, prefetcher_.sweep()) != prefetcher_.sweep()) engine_->widen_prefetch();
}

// Where the storage is needed first is what the next timetable is about.
void Tape::note_use(SavedStorage& storage, int64_t position, Moment& now) {
  if (!timed_ || std::exchange(storage.timed_in_sweep, prefetcher_.sweep()) == prefetcher_.sweep()) return;
  link_->in_stalls().add_point(now.event(), storage.size(), number_, position);
}

void Tape::prefetch(int64_t position) {
  if (prefetcher_.arrive(position)) uses_begun_ = 0;
  if (timetable_ != nullptr) {
    const int64_t begun_by_now = timetable_->in_by(position);
    while (uses_begun_ < begun_by_now && fetch(timetable_->position(uses_begun_)) != Prefetcher::Visit::kStop) {
      ++uses_begun_;
    }
    return;
  }
  const Prefetcher::Reach reach = engine_->reach(arrays_.slots[static_cast<size_t>(position)].run);
  prefetcher_.walk(
      reach, [this](int64_t p) { return arrays_.slots[static_cast<size_t>(p)].run; },
      [this](int64_t p) { return fetch(p); });
}

Prefetcher::Visit Tape::fetch(int64_t position) {
  SavedStorage* storage = arrays_.slots[static_cast<size_t>(position)].storage;
  if (storage == nullptr || storage->ahead_in_sweep == prefetcher_.sweep()) return Prefetcher::Visit::kGoOn;
  if (!loads_.empty() && loads_.front().storage == storage) return Prefetcher::Visit::kGoOn;  // being unpacked
  if (storage->state() == StorageState::kHost) {
    // Another owner keeps it: it costs nothing to have it, unless that owner lets go before it is needed.
    if (!storage->key().identity.expired() && storage->key().identity.unchanged()) return Prefetcher::Visit::kGoOn;
    if (!engine_->has_room(storage->size())) {
      held_back_in_sweep_ = prefetcher_.sweep();
      return Prefetcher::Visit::kStop;
    }
    try {
      loads_.push_back({storage, storage->allocate_target(*link_), StallMeter::Begun::kAhead});
    } catch (const c10::OutOfMemoryError&) {
      return Prefetcher::Visit::kStop;  // only a hint: there may be room when it is needed
    }
    engine_->reloaded(*storage, /*late=*/false);
    fetched_in_sweep_ = prefetcher_.sweep();
  }
  storage->ahead_in_sweep = prefetcher_.sweep();
  prefetcher_.add_ahead(storage->size());
  return Prefetcher::Visit::kGoOn;
}

void Tape::start_loads(Moment& now) {
  for (Load& load : loads_) load.storage->load(std::move(load.target), load.begun, *link_, now);
}

void Tape::count_used(SavedStorage& storage) {
  if (storage.ahead_in_sweep == prefetcher_.sweep()) prefetcher_.take_ahead(storage.size());
  storage.ahead_in_sweep = 0;
}

void Tape::forget(Place& place) noexcept {
  if (place.storage == nullptr) return;
  std::unique_ptr<SavedStorage> last;  // destroyed after the lock has been given back: it may own the tape
  SavedStorage& storage = *std::exchange(place.storage, nullptr);
  Tape* tape = storage.tape().get();
  const EngineLock lock(*tape->engine_);
  tape->arrays_.slots[static_cast<size_t>(place.position)].storage = nullptr;
  storage.leave(place.used_generation);
  if (storage.views() == 0) {
    last.reset(&storage);
    tape->count_used(storage);
    tape->arrays_.storages.erase(storage);
    tape->engine_->leave_queues(storage);
    storage.retire();
  } else if (storage.state() == StorageState::kReloaded && storage.all_used()) {
    try {
      storage.drop();
    } catch (const std::exception& error) {
      // Nothing is lost but the memory's early return: it goes with the storage.
      log_error("[offload] a device did not accept a wait: ", error.what());
    }
  }
}

}  // namespace neap::offload
