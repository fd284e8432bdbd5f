// Activation recomputation of a model's units: start here.
//
//   recompute::Recompute recompute;
//   recompute.attach(*model, {"model.layers.{*}"});      // whole layers
//   recompute.attach(*model, {"0-10"});                  // the first eleven
//   recompute.attach(*model, {"model.layers.{*}.mlp"});  // a part of each
//
// An attached unit keeps nothing of its forward but its inputs and runs again when backward needs the rest: region.h
// says how, and what that asks of the unit. It has to give its hook point a body that can run again
// (autograd/hook_point.h); the models of this library do. Units may lie within each other, and offload may be attached
// to the same ones: then the inputs leave the device.
//
// What a forward pass leaves is owned by its autograd graph; the object may be destroyed before backward. Units within
// a unit have to be attached as they were in forward when it runs again. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "neap/recompute/options.h"
#include "neap/recompute/report.h"

namespace torch::nn {
class Module;
}
namespace neap::trace {
class Recorder;
}

namespace neap::recompute {

class Recompute {
 public:
  // `recorder` gets a span per second run, if there is one. REQUIRES: it outlives the object.
  explicit Recompute(Options options = {}, trace::Recorder* recorder = nullptr);
  // Detaches. Graphs that are still alive can run backward afterwards.
  ~Recompute();
  Recompute(const Recompute&) = delete;
  Recompute& operator=(const Recompute&) = delete;

  // Makes units of the modules that the patterns name (autograd/unit_selection.h says how); none means the model's own
  // list of layers. UserErrors: a pattern that matches nothing, a second model; then nothing is attached. Attaching a
  // unit twice is attaching it once.
  void attach(torch::nn::Module& model, const std::vector<std::string>& patterns = {});
  // From now on forward passes are left alone. Idempotent.
  void detach() noexcept;

  // In the order of the model.
  [[nodiscard]] std::vector<std::string> unit_names() const;
  [[nodiscard]] const Options& options() const noexcept;

  // What happened since the last call.
  StepReport take_step_report();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace neap::recompute
