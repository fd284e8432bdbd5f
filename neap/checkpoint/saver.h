// Saves checkpoints: start here to write, at reader.h to read.
//
//   checkpoint::Saver saver("runs/a/checkpoints", {.keep_last = 3, .asynchronous = true}, world.get());
//   for (…) {
//     …one step…
//     saver.poll();
//     if (step % 100 == 0) saver.save(step, pieces, state);
//   }
//   saver.finish();
//
// Each rank writes the pieces that it holds to a file of its own, and of those that several hold each is written once.
// They go to a temporary directory and are flushed to the disk there; when all ranks are done, rank 0 adds the index
// and gives the directory its name. So whatever interrupts a save, a directory of that name is a whole checkpoint, and
// those from before are untouched.
//
// Asynchronously, save() has the device copy what this rank writes to pinned memory of a pool and returns; a thread
// writes meanwhile. Work that the run enqueues after save() comes after the copies on the device. One save is in flight
// at most. The files are the same, byte for byte. Host memory: what the rank writes, kept for the next save; where
// there is not as much, or the limit does not allow it, save() writes before it returns, with one warning.
//
// All member functions are collective (World null: one rank alone) and called from one thread. A rank's failure is a
// UserError on all of them, and the checkpoints from before stay.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/checkpoint/index.h"
#include "neap/checkpoint/piece.h"
#include "neap/files/file_system.h"
#include "neap/memory/pool_types.h"

namespace neap::comm {
class World;
}

namespace neap::checkpoint {

namespace internal {
class HostCopies;
}

struct SaverOptions {
  int64_t keep_last = 0;  // complete checkpoints that stay; 0: all
  bool asynchronous = false;
  std::optional<Bytes> host_limit = std::nullopt;  // of the memory for copies
  files::FileSystem* system = &files::FileSystem::system();
};

class Saver {
 public:
  // All ranks see the same directory. It is made when it is needed.
  Saver(std::filesystem::path dir, SaverOptions options, comm::World* world = nullptr);
  // Waits for the thread. A save that was not completed leaves nothing. Not collective.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Saves as `step`, replacing a checkpoint of that step. Every rank names the same tensors but for those that only
  // some have; each element of each must be in somebody's piece. Of the state that of rank 0 counts. Finishes the save
  // before first.
  void save(int64_t step, const std::vector<Piece>& pieces, State state);
  // Completes the save in flight if all ranks have written theirs, or one has failed to. Call it between steps.
  void poll();
  // Waits for the save in flight and completes it.
  void finish();
  [[nodiscard]] bool in_flight() const noexcept { return job_ != nullptr; }
  // Of the pool that copies lie in.
  [[nodiscard]] memory::PoolCounters host_counters() const;

 private:
  struct Job;

  void begin(int64_t step, const std::vector<Piece>& pieces, State state);
  void complete();

  const std::filesystem::path dir_;
  const SaverOptions options_;
  comm::World* world_;
  std::unique_ptr<internal::HostCopies> host_;  // outlives the job
  std::unique_ptr<Job> job_;
  bool warned_ = false;
};

}  // namespace neap::checkpoint
