// What a region's first run found around it on its thread, and how a second run finds the same: current devices and
// streams, autocast, grad mode.
//
// Streams: autograd runs each node on the stream on which its forward ran, and orders streams where gradients cross.
// A second run on the streams of the first is therefore ordered with the nodes that use its tensors, whichever thread
// it happens on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

namespace neap::recompute::internal {

// The devices of the tensors and of `more`, each once and without meta; the CPU first, then
// in order of type and index.
std::vector<c10::Device> devices_of(at::ArrayRef<at::Tensor> tensors, at::ArrayRef<c10::Device> more);

class Autocast {
 public:
  // As it is on this thread for the types of these devices.
  explicit Autocast(at::ArrayRef<c10::Device> devices);
  void apply() const;

 private:
  struct OfType {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<OfType> types_;
  bool cache_;
};

class Environment {
 public:
  // Of the calling thread. Devices of one accelerator type at most.
  explicit Environment(std::vector<c10::Device> devices);

  const std::vector<c10::Device>& devices() const { return devices_; }

  // The thread's devices and streams are those of the environment while it lives. REQUIRES: as all guards, destroyed on
  // its thread in turn.
  class Streams {
   public:
    explicit Streams(const Environment& environment);

   private:
    std::optional<c10::DeviceGuard> device_;
    std::optional<c10::MultiStreamGuard> streams_;
  };

  // The same for autocast and grad mode. What the run puts into autocast's cache is dropped: casts of weights that
  // belong to a graph which is thrown away.
  class Modes {
   public:
    explicit Modes(const Environment& environment);
    ~Modes();
    Modes(const Modes&) = delete;
    Modes& operator=(const Modes&) = delete;

   private:
    const at::AutoGradMode grad_;
    const Autocast before_;
  };

 private:
  std::vector<c10::Device> devices_;
  std::optional<c10::Device> current_device_;
  std::vector<c10::Stream> streams_;
  Autocast autocast_;
};

}  // namespace neap::recompute::internal
