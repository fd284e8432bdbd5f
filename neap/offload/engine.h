// The activation offload engine: start here.
//
//   offload::Engine engine({.prefetch = offload::Layers{1}});
//   engine.attach(*model, {"model.layers.{*}"});
//   …train as before…
//   offload::StepReport report = engine.take_step_report();
//
// While an attached unit runs its forward, each tensor that autograd saves is handed to the engine. It copies the
// storage behind it to the host and drops autograd's reference; the memory is free once its last owner lets go. In
// backward the storage comes back before it is used. Numbers never change.
//
// The engine owns options, host pool, streams and statistics; the state of a forward pass is owned by the autograd
// graph that the pass made and goes with it. So an engine may be destroyed before backward, a graph may be dropped, and
// an exception anywhere leaves nothing behind. Engines are independent of each other; they may share a host pool.
//
// Thread-safe: units may run on several threads; attach() and detach() may come at any time, for passes begun later.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "neap/memory/host_pool.h"
#include "neap/offload/options.h"
#include "neap/offload/report.h"

namespace torch::nn {
class Module;
}
namespace neap::autograd {
struct ModelUnits;
}
namespace neap::trace {
class Recorder;
}

namespace neap::offload {

struct Resources {
  std::shared_ptr<memory::HostPool> pool{};  // null: one of the engine's own, made for the device of the model
  trace::Recorder* recorder = nullptr;       // null: no trace. REQUIRES: outlives the engine
};

class Engine {
 public:
  // UserError on invalid options.
  explicit Engine(Options options = {}, Resources resources = {});
  // Detaches. Graphs that are still alive can run backward afterwards.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Makes units of the model's modules that the patterns name (autograd/unit_selection.h says how); none means the
  // model's own list of layers. Only autograd::Hookable modules can be units. Attaching a unit twice is attaching it
  // once; attaching a second model to one engine, or matching nothing, is a UserError, and then nothing is attached.
  void attach(torch::nn::Module& model, const std::vector<std::string>& patterns = {});
  // The same for a model whose units are known already, say one that is written in another language.
  void attach(const autograd::ModelUnits& model);
  // From now on forward passes are left alone. Names of parameters and modules were never touched. Idempotent.
  void detach() noexcept;

  // In the order of the model.
  [[nodiscard]] std::vector<std::string> unit_names() const;
  [[nodiscard]] const Options& options() const noexcept;

  // What happened since the last call. Call it when a step is over; it does not wait for the device.
  StepReport take_step_report();
  [[nodiscard]] memory::PoolCounters host_counters() const;

 private:
  friend class Scope;
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// What this thread saves while it lives is handed to the engine, as if it all belonged to one unit, `scope` by name:
// for forwards that are not the forward of a module. Units of the engine that run inside take part in the same pass. As
// a unit does, it leaves tensors alone without grad mode and inside another feature's region; backward may run inside
// it. Needs no attach(); without it nothing tells frozen parameters and buffers from activations. REQUIRES: destroyed
// on the thread that made it, in the reverse order of construction. On another thread, where languages that collect
// garbage may do that, it is not destroyed but stays open, and an error is logged.
class Scope {
 public:
  explicit Scope(Engine& engine);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  struct Open;
  std::unique_ptr<Open> open_;
};

}  // namespace neap::offload
