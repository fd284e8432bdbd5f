// The saved storages of one forward pass, in the order they were saved.
//
// A tape belongs to the graph of its pass: saved tensors keep it through their storage, and the thread that runs the
// pass until it begins another. It holds no storage itself. Positions count saved tensors; a storage saved again has a
// position for each time, since backward needs it first at the last one. A waypoint takes a position too, and a number
// among the storages: nothing is saved there, but forward comes by, and so does backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "neap/base/mutex.h"
#include "neap/offload/link.h"
#include "neap/offload/prefetcher.h"
#include "neap/offload/saved_storage.h"
#include "neap/offload/storage_table.h"
#include "neap/offload/timetable.h"

namespace neap::offload {

class EngineState;

// What a saved tensor knows about its place.
struct Place {
  SavedStorage* storage = nullptr;  // the tensor is counted among its views
  int64_t position = 0;
  uint32_t used_generation = 0;
};

// Device memory that holds a saved tensor's bytes, `origin` bytes further than they were saved.
struct Unpacked {
  c10::Storage device;
  int64_t origin = 0;
};

// The arrays of a pass. With those of a pass that is over the next one needs no large piece of memory, for which the
// general allocator would first tidy up all the small ones. Thread-safe.
class TapeRoom {
 public:
  struct Slot {
    SavedStorage* storage;  // null when the saved tensor is gone, and at a waypoint
    int64_t run;
  };
  struct Arrays {
    std::vector<Slot> slots;
    StorageTable<SavedStorage, &SavedStorage::known> storages;
  };

  // Empty, with place for so many saved tensors.
  Arrays take(size_t expected) NEAP_EXCLUDES(mutex_);
  void give_back(Arrays arrays) noexcept NEAP_EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  Arrays kept_ NEAP_GUARDED_BY(mutex_);
};

// Methods marked "locked" require the engine's lock; the others take it.
class Tape : public std::enable_shared_from_this<Tape> {
 public:
  // Room is made for so many saved tensors. `number` tells passes apart; the timetable may be null; a timed pass takes
  // the times for the next one.
  Tape(std::shared_ptr<EngineState> engine, std::shared_ptr<Link> link, int64_t number, size_t expected,
       std::shared_ptr<const Timetable> timetable, bool timed);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // ---- forward
  // A call of a unit's forward begins. Locked.
  void begin_run(int32_t unit);
  bool has_run(int32_t unit) const;        // locked
  bool turned() const { return turned_; }  // locked; backward has begun
  std::thread::id thread() const { return thread_; }
  c10::Device device() const { return link_->device().c10_device(); }

  // REQUIRES: may_leave(tensor). Null storage: smaller than what may leave after all.
  Place pack(const at::Tensor& tensor, int32_t unit);
  // Forward is at a waypoint; returns its position. Locked.
  int64_t add_waypoint();

  // ---- backward
  Unpacked unpack(Place& place);
  // Backward is at a waypoint. Locked.
  void come_by(int64_t waypoint);
  // The saved tensor is gone; on whatever thread.
  static void forget(Place& place) noexcept;

  // ---- for the engine, locked
  Link& link() const { return *link_; }
  const std::shared_ptr<Link>& shared_link() const { return link_; }
  int64_t runs() const { return runs_; }
  Bytes bytes() const { return bytes_; }
  size_t length() const { return arrays_.slots.size(); }  // in positions
  int64_t number() const { return number_; }
  bool timed() const { return timed_; }
  // Null as soon as the pass is seen to be another than the one it was made for.
  const Timetable* timetable() const { return timetable_.get(); }
  void drop_timetable() { timetable_.reset(); }
  int64_t storages_saved() const { return storages_saved_; }  // with the one that is being saved
  template <class Visit>
  void for_each_storage(Visit visit) const {
    arrays_.storages.for_each(visit);
  }

 private:
  SavedStorage* find(const StorageKey& key, size_t hash) const;
  Place append(SavedStorage& storage);
  // A storage that is to be loaded, and the memory for it.
  struct Load {
    SavedStorage* storage;
    c10::Storage target;
    StallMeter::Begun begun;
  };
  void turn();
  void bring(SavedStorage& storage);
  void prefetch(int64_t position);
  void note_use(SavedStorage& storage, int64_t position, Moment& now);
  Prefetcher::Visit fetch(int64_t position);
  void start_loads(Moment& now);
  void count_used(SavedStorage& storage);

  const std::shared_ptr<EngineState> engine_;
  const std::shared_ptr<Link> link_;
  const int64_t number_;
  const bool timed_;
  const std::thread::id thread_ = std::this_thread::get_id();
  // Guarded by the engine's lock:
  TapeRoom::Arrays arrays_;
  std::vector<bool> units_run_;
  int64_t runs_ = 0;
  Bytes bytes_;
  int64_t storages_saved_ = 0;
  std::shared_ptr<const Timetable> timetable_;
  int64_t uses_begun_ = 0;  // of the timetable, in this sweep
  bool turned_ = false;
  int64_t fetched_in_sweep_ = 0;    // the sweep in which something was prefetched
  int64_t held_back_in_sweep_ = 0;  // the sweep in which something was not prefetched for lack of room
  int64_t late_in_sweep_ = 0;       // the sweep in which a reload was late all the same
  Prefetcher prefetcher_;
  std::vector<Load> loads_;  // of the unpack under way
};

}  // namespace neap::offload
