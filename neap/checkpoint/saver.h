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
// Asynchronously, save() copies what this rank writes to host memory of the saver's own and returns; a thread writes
// meanwhile. One save is in flight at most. The files are the same, byte for byte. Host memory: what the rank writes.
//
// All member functions are collective (World null: one rank alone) and called from one thread. A rank's failure is a
// UserError on all of them, and the checkpoints from before stay.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "neap/checkpoint/index.h"
#include "neap/checkpoint/piece.h"
#include "neap/files/file_system.h"

namespace neap::comm {
class World;
}

namespace neap::checkpoint {

struct SaverOptions {
  int64_t keep_last = 0;  // complete checkpoints that stay; 0: all
  bool asynchronous = false;
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

 private:
  struct Job;
  class HostCopies;

  void begin(int64_t step, const std::vector<Piece>& pieces, State state);
  void complete();

  const std::filesystem::path dir_;
  const SaverOptions options_;
  comm::World* world_;
  std::unique_ptr<HostCopies> host_;
  std::unique_ptr<Job> job_;
};

}  // namespace neap::checkpoint
