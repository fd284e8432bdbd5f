// The loss on held-out data: the mean over the tokens of its first batches, in the order of the file.
//
// Batches go round the ranks, and their sums are added in the order of the file in float64, so that any number of ranks
// measures the same bits wherever it computes the same. Nothing is trained and no state of the run changes, so that a
// run with evaluations has the bits of one without. Not thread-safe.
#pragma once

#include <cstdint>

#include "neap/train/trainer.h"

namespace torch::nn {
class Module;
}

namespace neap::train {

class Evaluation {
 public:
  struct Parts {
    torch::nn::Module* model = nullptr;  // evaluates while it is measured (Module::eval()); null: makes no difference
    Trainer::Loss loss;                  // ignores the label -100
    const Sequences& sequences;
    device::Device& device;
    comm::World* world = nullptr;  // as in Trainer::Parts
    shard::Sharded* sharded = nullptr;
  };

  // Of train: batch, sequence and eval_batches. UserError when no label of them counts: their mean loss is none.
  Evaluation(Parts parts, const TrainSection& train);

  // Collective. Waits for the device.
  double loss();

 private:
  at::Tensor batch_loss(int64_t batch);

  Parts parts_;
  const TrainSection train_;
  const int64_t ranks_, rank_;
  int64_t sequences_;  // that take part
  int64_t labels_;     // of them, that count
};

}  // namespace neap::train
