// torch-free
// A queue of one device. Its virtual side (times, what is ordered before) lives here and is guarded by the Engine; its
// real side is a TaskQueue.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "neap/sim/engine/access_log.h"
#include "neap/sim/engine/event.h"
#include "neap/sim/engine/task_queue.h"
#include "neap/sim/engine/types.h"

namespace neap::sim {

class Stream {
 public:
  Stream(int device, int id, int index);

  int device() const { return device_; }
  int id() const { return id_; }
  // "sim:0 stream 2"
  const std::string& name() const { return name_; }

 private:
  friend class Engine;

  // A freed block of this home stream that another stream may still use.
  struct Unordered {
    uint64_t block;
    std::size_t bytes;
    Access use;
  };

  const int device_;
  const int id_;
  const int index_;  // in vector clocks; unique over all devices
  const std::string name_;
  const std::string track_;  // of the recorder

  // Guarded by the Engine's mutex.
  VectorClock seen_;
  uint64_t number_ = 0;        // of the last operation
  uint64_t host_version_ = 0;  // of the host's knowledge that seen_ contains
  Nanoseconds free_at_ = 0;    // when the last work ends
  Nanoseconds barrier_ = 0;    // when the last event is ready that later work waits for
  // Waits that nothing has followed yet. The next kernel waits for them itself; only a copy or a record makes them
  // tasks.
  std::vector<std::shared_ptr<const Recording>> waits_;
  std::vector<Unordered> unordered_;

  TaskQueue queue_;
};

}  // namespace neap::sim
