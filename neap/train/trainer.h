// The training loop's one step: forward and backward over the micro-batches, clipping, update.
//
// Token-weighted: each micro-batch's loss is its sum over the labels of the whole step that count, so gradients and the
// reported loss are means over all of those, however they were split, also over ranks (parallel.h). Same data, same
// seed, same bits, with or without offload and recomputation.
//
// Batches are read ahead by a thread of their own (batch_reader.h). The host waits for the device once a step, for the
// gradient norm, and where the device has a clock of its own also for the end of the step, to read it. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/device/device.h"
#include "neap/train/batch_reader.h"
#include "neap/train/config.h"
#include "neap/train/memory_report.h"
#include "neap/train/metrics.h"
#include "neap/train/optimizer.h"
#include "neap/train/schedule.h"
#include "neap/train/sequences.h"

namespace neap::offload {
class Engine;
}
namespace neap::comm {
class World;
}
namespace neap::recompute {
class Recompute;
}
namespace neap::shard {
class Sharded;
}
namespace neap::trace {
class Recorder;
}

namespace neap::train {

class NonFiniteError : public Error {
 public:
  using Error::Error;
};

class ExpertBalance;
class PeakMeter;

class Trainer {
 public:
  // Sums over tokens, divided by `divisor`.
  struct LossValue {
    LossValue(at::Tensor loss) : objective(loss), loss(std::move(loss)) {}  // NOLINT: most losses are all there is
    LossValue(at::Tensor sum, at::Tensor of_model, at::Tensor of_mtp)
        : objective(std::move(sum)), loss(std::move(of_model)), mtp_loss(std::move(of_mtp)) {}
    at::Tensor objective;  // what is differentiated
    at::Tensor loss;       // what is reported as such …
    at::Tensor mtp_loss;   // … and beside it; undefined: nothing
  };
  using Loss = std::function<LossValue(const at::Tensor& inputs, const at::Tensor& labels, double divisor)>;

  struct Parts {
    Loss loss;
    const Sequences& sequences;
    Optimizer& optimizer;
    std::vector<at::Tensor> frozen = {};  // parameters beside those of the optimizer, for the accounts of memory
    LearningRate rate;
    device::Device& device;
    offload::Engine* engine = nullptr;
    recompute::Recompute* recompute = nullptr;
    ExpertBalance* experts = nullptr;
    trace::Recorder* recorder = nullptr;
    bool device_has_clock = false;  // a clock of its own, not the host's: report both times, and wait for its end
    // Several ranks: both. `loss` runs the sharded model, the optimizer has its pieces, and step() is collective.
    comm::World* world = nullptr;
    shard::Sharded* sharded = nullptr;
    std::function<bool()> stop_requested = {};  // of this rank; empty: never
    // Where the run goes on, when it does.
    int64_t steps_done = 0;
    int64_t sequences_done = 0;
  };

  Trainer(Parts parts, const TrainSection& train, double clip);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // One update. When it throws, the parameters are those of the step before and no gradients are left.
  //   NonFiniteError      the policy is stop
  //   DeviceOutOfMemory   with what held the memory; other ranks know nothing of it
  //   comm::RankFailure   another rank is gone
  StepMetrics step();

  // Several ranks: some rank wanted to stop when the latest step had its gradients. The same answer on all of them.
  bool stop_agreed() const noexcept { return stop_agreed_; }

  // Steps and sequences that are trained on, by all ranks together and before this trainer was made, too.
  int64_t steps_done() const noexcept { return steps_done_; }
  int64_t sequences_done() const noexcept { return sequences_done_; }

 private:
  // Of each kind of loss the sum over micro-batches, or with several ranks each of them.
  using Losses = std::vector<std::vector<at::Tensor>>;
  int64_t labels_of_all(int64_t mine) const;
  double divisor_of(int64_t labels);
  void accumulate_gradients(Losses& losses);
  void add_losses(const LossValue& value, Losses& losses) const;
  void reduce(const Losses& losses, StepMetrics& metrics);
  void update(StepMetrics& metrics);
  void add_offload_report(StepMetrics& metrics) const;
  void add_recompute_report(StepMetrics& metrics) const;
  std::vector<at::Tensor> all_parameters() const;
  template <class Function>
  void phase(const char* name, Function&& function);

  Parts parts_;
  TrainSection train_;
  double clip_;
  std::unique_ptr<PeakMeter> peak_;
  const int64_t ranks_;
  const int64_t rank_;
  BatchReader reader_;
  int64_t steps_done_;
  int64_t sequences_done_;
  bool stop_agreed_ = false;
  bool warned_of_no_labels_ = false;
  const char* phase_ = "";
};

// Of the model and the optimizer as they are now, and of the peak since the last reset.
MemoryUse memory_use(const std::vector<at::Tensor>& parameters, Bytes optimizer, const device::Device& device);

// What the allocator of any device says about a failed allocation, or nothing when `error` is of another kind.
std::optional<std::string> out_of_memory_text(const std::exception& error);

}  // namespace neap::train
