// What an engine and the graphs it has seen share; lives as long as the longest of them. Private to neap/offload.
//
// Here everything is decided that concerns more than one pass: who leaves the device and when, how much may be in
// flight, how far prefetch reaches, and what the report says. One lock guards it together with all tapes and storages.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "neap/autograd/resident_storages.h"
#include "neap/base/log.h"
#include "neap/base/mutex.h"
#include "neap/memory/host_pool.h"
#include "neap/offload/adaptive_window.h"
#include "neap/offload/departure.h"
#include "neap/offload/engine.h"
#include "neap/offload/peak_watch.h"
#include "neap/offload/tape.h"
#include "neap/offload/timetable.h"

namespace neap::offload {

using ListTensors = std::function<std::vector<at::Tensor>()>;

class EngineState : public std::enable_shared_from_this<EngineState> {
 public:
  EngineState(Options options, Resources resources);

  const Options options;
  autograd::ResidentStorages residents;  // has its own lock
  Mutex mutex;                           // taken as EngineLock where device memory may go or something be logged
  StepReport report;                     // since the last one; guarded by the mutex
  Ledger ledger;                         // guarded by the mutex
  TapeRoom tape_room;                    // has its own lock

  // ---- set up
  // The tensors that are never offloaded, wherever their storages may be moved to later. The device is that of the
  // first of them, or, for a model without any, of the first tensor that it saves; an accelerator goes before the CPU.
  // `list_again` gives them anew when some have gone; may be empty.
  void set_model(const std::vector<at::Tensor>& parameters_and_buffers, ListTensors list_again);
  int32_t add_unit(std::string name);
  // Forward passes leave no trace from now on.
  void stop();
  // The engine is going: what it was given by others may go too.
  void disconnect();

  // ---- forward
  // Before a unit begins: when it would begin a pass and tensors of the model have gone since, asks for them anew.
  // Locks for itself, but not while it asks.
  void refresh_model(int32_t unit);
  // A unit begins: in the pass that this thread is in, or in a new one. Null: nothing can be offloaded now, or the
  // device is not known yet. `within` is the tape of a surrounding unit of this engine, or null.
  std::shared_ptr<Tape> enter(int32_t unit, const std::shared_ptr<Tape>& within);
  bool active();
  void adopt_device(c10::Device device);
  // It ends, by return or exception, having saved and kept so many tensors.
  void leave(int32_t unit, int64_t begin_ns, int64_t saved, int64_t kept) noexcept;
  int64_t run() const { return run_; }  // locked: number of the latest run of any unit

  // What runs after the units has run, as this call of it: a waypoint of the pass that this thread is in, if any.
  void after_units(uint64_t call);

  // The tape has come to the storage or waypoint with this number. Locked.
  void came_to(Tape& tape, int64_t number, Bytes size, Moment& now);
  // Decides where a new storage goes, and acts. Locked.
  void saved(SavedStorage& storage, Tape& tape, Moment& now);
  void saved_again(SavedStorage& storage, Tape& tape, int32_t unit);  // locked
  // Sends away what can no longer be in the tail, then lets go of what is on its way out. Locked.
  void settle(Moment& now);

  // ---- backward
  void begin_backward(int32_t unit);
  void end_backward(int32_t unit);
  // Backward has come to the output of this call.
  void before_units(uint64_t call);
  // The rest is locked.
  void turned(Tape& tape);
  void reloaded(const SavedStorage& storage, bool late);
  Prefetcher::Reach reach(int64_t run) const;
  void widen_prefetch() { reload_window_.widen(); }
  void want_times() { times_wanted_ = true; }
  // For a storage of this size ahead of its use.
  bool has_room(Bytes size) const;

  void leave_queues(SavedStorage& storage);

  StepReport take_report();
  memory::PoolCounters host_counters();

 private:
  struct Unit {
    std::string name;
    bool hit = false;  // since the last report
  };

  using Threads = std::vector<std::shared_ptr<Tape>>;
  Threads::iterator of_this_thread();
  static bool begins_pass(const Tape& tape, int32_t unit);
  void remember(const std::vector<at::Tensor>& tensors);
  std::shared_ptr<Tape> begin_pass();
  void refresh_device();
  void end_measuring();
  void learn();
  void make_timetable();
  void drop_timetable(Tape& tape);
  void launch(SavedStorage& storage, Moment& now);
  void relieve(Moment& now);
  Departure::Tail tail() const;
  Bytes release_window() const { return release_window_.size(); }  // never more than max_in_flight
  bool automatic() const { return std::holds_alternative<Automatic>(options.prefetch); }
  void look(Piece next);
  std::string words(Piece piece) const;

  // All guarded by the mutex.
  std::shared_ptr<memory::HostPool> pool_;
  bool own_pool_ = false;
  std::shared_ptr<Link> link_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> model_;
  ListTensors list_again_;
  std::vector<Unit> units_;
  std::optional<c10::Device> adopted_device_;
  bool stopped_ = false;
  trace::Recorder* recorder_;  // null once the engine has stopped
  Threads current_;            // one per thread that runs forward
  // Calls that are waypoints of passes whose backward may come.
  struct Waypoint {
    uint64_t call;
    std::weak_ptr<Tape> tape;
    int64_t position;
  };
  std::vector<Waypoint> waypoints_;
  std::optional<PassShape> learned_;
  size_t expected_length_ = 0;  // of a tape
  Departure departure_{{}, std::nullopt};
  int64_t run_ = 0;
  Bytes saved_;  // of all storages so far
  StorageQueue<SavedStorage, &SavedStorage::waiting> waiting_;
  StorageQueue<SavedStorage, &SavedStorage::in_flight> in_flight_;
  int64_t passes_ = 0;
  // While there is a timetable it says when copies begin and end, and the windows, which serve without one, rest.
  std::shared_ptr<const Timetable> timetable_;
  bool by_timetable_ = false;       // the latest pass
  bool times_wanted_ = true;        // something has shown that the timetable is not as it should be
  PassTimes out_times_, in_times_;  // of the latest pass that is known
  Slack out_slack_, in_slack_;
  AdaptiveWindow release_window_, reload_window_;
  PeakWatch peak_;
  bool warned_of_host_limit_ = false;
};

// The engine's lock. What other people's code may run for, the end of device memory (finalizers) and messages (sinks),
// waits until it has been given back: that code may want it.
class NEAP_ANNOTATE(scoped_lockable) EngineLock {
 public:
  explicit EngineLock(EngineState& engine) NEAP_ANNOTATE(acquire_capability(engine.mutex)) : engine_(engine) {
    engine.mutex.lock();
  }
  ~EngineLock() NEAP_ANNOTATE(release_capability()) {
    for (c10::Storage& storage : engine_.ledger.let_go) gone_.push_back(std::move(storage));
    engine_.ledger.let_go.clear();
    engine_.mutex.unlock();
  }
  EngineLock(const EngineLock&) = delete;
  EngineLock& operator=(const EngineLock&) = delete;

 private:
  const HoldMessages messages_;
  c10::SmallVector<c10::Storage, 4> gone_;
  EngineState& engine_;
};

}  // namespace neap::offload
