// Batches of a run's sequences as host tensors, read by a thread of its own before the step asks for them.
//
// Which sequences a batch holds is the caller's to say, position by position; the reader only guesses that the next
// request lies one stride further, and starts again from any other. So nothing has to be told to it when a run is
// resumed. One thread at a time. The sequences must outlive it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "neap/train/sequences.h"

namespace neap::train {

template <class Item>
class ReadAhead;

// Both [batch, sequence] of int64. In pinned memory where the device has such: a copy that does not block may be
// enqueued and the tensor dropped.
struct Batch {
  at::Tensor inputs;
  at::Tensor labels;
  int64_t learned = 0;  // of the first of a step: labels in all of its batches that the data does not leave out
};

class BatchReader {
 public:
  struct Options {
    int64_t batch = 1;
    int64_t sequence = 1;  // the length of the sequences
    int64_t stride = 1;    // positions from one batch to the next
    int64_t step = 1;      // batches whose labels are counted together
    size_t ahead = 2;      // batches that may be ready
    c10::Device device = c10::kCPU;
  };
  BatchReader(const Sequences& sequences, Options options);
  ~BatchReader();

  // The sequences at `position` … `position` + batch - 1. REQUIRES: a position that is not next in line begins a step.
  // Throws what reading them threw: UserError for a file that has been cut meanwhile, an error of memory.
  Batch read(int64_t position);

  // What read() has waited so far.
  std::chrono::nanoseconds waited() const noexcept;

 private:
  const Sequences& sequences_;
  const Options options_;
  std::unique_ptr<ReadAhead<Batch>> ahead_;
  int64_t next_ = 0;                   // the position that ahead_ has in line
  std::chrono::nanoseconds waited_{};  // for those before ahead_
};

}  // namespace neap::train
