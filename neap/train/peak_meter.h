// What the device's memory holds where a step's peak is.
//
// The allocator tells how high the peak was, not when or of what. This meter looks at it where the trainer's pieces of
// a step end and whenever a parameter's gradient has arrived, or of a sharded model before full parameters and
// gradients come and go: a peak that rose since the look before rose in between, and between two looks the model's
// state is known to the byte.
//
// Belongs to one trainer. Not thread-safe: the looks of backward come from the device's autograd thread, while the
// thread that called backward waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/device/device.h"
#include "neap/train/metrics.h"

namespace neap::shard {
class Sharded;
}

namespace neap::train {

class PeakMeter {
 public:
  // `parameters` lie on `device`. Hooks their gradient accumulators until it is destroyed; other hooks are left alone.
  PeakMeter(const std::vector<at::Tensor>& parameters, const device::Device& device);
  // Watches the memory of the sharded model, which lies on `device`, until it is destroyed.
  PeakMeter(shard::Sharded& sharded, const device::Device& device);
  ~PeakMeter();
  PeakMeter(const PeakMeter&) = delete;
  PeakMeter& operator=(const PeakMeter&) = delete;

  // A step begins, without gradients, and the device's peak has just been reset.
  void begin_step(Bytes optimizer_state);
  // `piece`, a part of the step, begins: what is seen from here on is of it. REQUIRES: the text outlives the meter.
  void begin_piece(const char* piece) { piece_ = piece; }
  // `piece`, a part of the step, has ended. REQUIRES: the text outlives the meter.
  void look(const char* piece);
  // Of the peak so far; empty where the device counts nothing.
  std::optional<PeakParts> parts() const { return parts_; }

 private:
  class Arrival;
  struct Hooked;

  void arrived(size_t parameter);
  // `arrived`: gradients that did not exist at the look before.
  void look(const char* piece, Bytes arrived);

  const device::Device& device_;
  shard::Sharded* const sharded_ = nullptr;
  const char* piece_ = "between steps";
  std::vector<Hooked> hooked_;  // one per parameter that requires gradients
  Bytes parameters_, optimizer_, gradients_;
  Bytes peak_;
  Bytes rest_;  // beside the model's state, at the latest look
  std::optional<PeakParts> parts_;
};

}  // namespace neap::train
