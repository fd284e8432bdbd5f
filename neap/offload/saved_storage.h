// One storage that autograd saved for backward, and its moves between device and host.
//
// Owned by the tensors saved from it (PackedView), which count themselves in and out; each is a view of the same bytes.
// The storage is identified by weak reference: what other owners do with their references is their affair, and the
// memory is free when the last of them and ours are gone.
//
// Device memory that we let go is given out again only behind our own copies of it: either the stream that owns it
// (`home`) has waited for them, or the allocator was told that the copy stream uses it. (Memory that lives on a third
// stream is safe too: who uses it on `home` has to record it there, and that record is behind our wait.) Nobody waits
// on the host.
//
// Not thread-safe: guarded by the engine's lock.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "neap/autograd/storage_identity.h"
#include "neap/base/pooled.h"
#include "neap/device/event.h"
#include "neap/device/stream.h"
#include "neap/memory/host_pool.h"
#include "neap/offload/link.h"
#include "neap/offload/storage_queue.h"
#include "neap/offload/storage_state.h"
#include "neap/offload/storage_table.h"

namespace neap::offload {

class Tape;

// What makes two saved tensors views of one SavedStorage.
struct StorageKey {
  autograd::StorageIdentity identity;
  ByteRange range;
  friend bool operator==(const StorageKey&, const StorageKey&) = default;
};

// What is counted and collected over all storages of an engine. Guarded by its lock.
struct Ledger {
  Bytes away;  // of storages that are on the host alone now
  // Device memory that was let go. Whoever made it may run code of his own at its end, so that comes after the lock.
  std::vector<c10::Storage> let_go;
};

class SavedStorage : public Pooled<SavedStorage> {
 public:
  // `home`: the stream that is current where the tensor is saved.
  SavedStorage(std::shared_ptr<Tape> tape, StorageKey key, const c10::Storage& device, const device::Stream& home,
               int32_t unit, Ledger& ledger);
  // Whatever is under way keeps the memory it needs. REQUIRES: out of all queues, and retired. Without the lock.
  ~SavedStorage();
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;

  const StorageKey& key() const { return key_; }
  Bytes size() const { return Bytes(key_.range.size()); }
  StorageState state() const { return state_; }
  const std::shared_ptr<Tape>& tape() const { return tape_; }
  int32_t unit() const { return unit_; }
  const device::Event& copied() const { return copied_; }
  const device::Stream& home() const { return home_; }

  // ---- moves. Those that throw leave the state as it was.
  // kDevice → kCopyingOut; at once → kHost where copies do not overlap.
  void copy_out(Link& link, memory::HostBuffer host, Moment& now);
  void keep() { become(StorageState::kKept); }
  // kCopyingOut → kHost. The home stream waits for the copy, unless the host knows it to be over.
  enum class Copy { kUnderWay, kDone };
  void release(Copy copy);
  // kCopyingOut or kHost → kReloaded, when the bytes are still on the device, in our hands or in another owner's, and
  // nobody has changed them. False when not.
  bool forward();
  // kHost → kCopyingIn; at once → kReloaded where copies do not overlap. The memory is allocated beforehand, so that
  // one place in the compute stream is behind the allocations of all that is loaded at a time. REQUIRES: now.event() is
  // not older than the allocation.
  c10::Storage allocate_target(const Link& link) const { return link.allocate(padding_ + size().count); }
  void load(c10::Storage target, StallMeter::Begun begun, Link& link, Moment& now);
  // kReloaded → kHost: the host still has the bytes.
  void drop();
  // It is about to be destroyed: the engine counts it no more.
  void retire();

  // The device memory, made safe to use on the stream; a byte of the storage is found `origin()` bytes further in it.
  // The stream waits for the copy in, if there was one. REQUIRES: state() != kHost.
  const c10::Storage& use(Link& link, Moment& now);
  int64_t origin() const { return is_reload_ ? padding_ - key_.range.begin : 0; }

  // ---- the tensors saved from it. A generation is one stay on the device; of each it is known who has used it.
  int32_t views() const { return views_; }
  uint32_t join() { return ++views_, ++unused_, generation_ - 1; }
  void leave(uint32_t used_generation) { --views_, unused_ -= used_generation != generation_; }
  void mark_used(uint32_t& used_generation) {
    unused_ -= used_generation != generation_;
    used_generation = generation_;
  }
  // All tensors saved from it that are still there have been handed out in this generation.
  bool all_used() const { return unused_ == 0; }

  // ---- places in the engine's queues, and what the tape remembers about it.
  QueueLink<SavedStorage> waiting;    // on the device, not decided yet
  QueueLink<SavedStorage> in_flight;  // on its way out, device memory still held
  TableLink<SavedStorage> known;      // among the tape's storages
  int64_t run = 0;                    // latest run that saved it
  int64_t number = 0;                 // it was the tape's so-manieth, from 0
  Bytes saved_before{};               // by this engine, when its copy out began
  int64_t ahead_in_sweep = 0;         // counted as lying ahead in this sweep of the prefetcher; 0 when not
  int64_t timed_in_sweep = 0;         // its first use in this sweep has been noted

 private:
  void hold_again(c10::Storage device, bool is_reload);
  void begin_generation() { ++generation_, unused_ = views_; }
  void order_home();
  void become(StorageState state);
  void let_go();

  const std::shared_ptr<Tape> tape_;
  const StorageKey key_;
  const int32_t unit_;  // the unit that saved it first
  Ledger& ledger_;
  StorageState state_ = StorageState::kDevice;
  int32_t views_ = 0;
  int32_t unused_ = 0;
  uint32_t generation_ = 1;

  c10::Storage device_;  // empty in kHost
  int64_t padding_;      // how far the range's first byte is beyond a multiple of kAlignment
  device::Stream home_;
  memory::HostBuffer host_;
  device::Event copied_, loaded_;
  int64_t copy_number_ = 0;
  StallMeter::Begun load_begun_ = StallMeter::Begun::kAhead;
  // The memory of the last reload, as long as some tensor handed out uses it.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> last_reload_;
  bool is_reload_ = false;                   // device_ is memory of ours, not that which was saved
  std::optional<device::Stream> waited_by_;  // the stream that waited for loaded_ last
  bool let_go_ordered_ = true;               // the allocator gives device_ out again only behind our copies
};

}  // namespace neap::offload
