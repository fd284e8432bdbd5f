// What the engine does at a unit's hook point, and what is open while the unit's forward runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/offload/engine_state.h"
#include "neap/offload/packed_view.h"

namespace neap::offload {

// Hands every tensor that a unit's forward saves to a tape. On the stack of the thread that runs the forward.
class PackScope final : public autograd::SavedTensorPolicy {
 public:
  // REQUIRES: engine->active(); `name` outlives the scope.
  PackScope(std::shared_ptr<EngineState> engine, const std::shared_ptr<Tape>& within, int32_t unit,
            const std::string& name);
  ~PackScope() override;
  PackScope(const PackScope&) = delete;
  PackScope& operator=(const PackScope&) = delete;

  // Null inside a backward pass that runs while the scope is open: what is saved there comes of a recomputation, and is
  // needed at once.
  std::unique_ptr<autograd::SavedVariableHooks> make_hook() override;

  // The tensor is of a kind that can leave, and neither a rule nor the user's policy keeps it.
  bool may_leave(const at::Tensor& tensor);

  void count_saved() { ++saved_; }
  void count_kept() { ++kept_; }
  Tape& tape() const { return *tape_; }
  const std::shared_ptr<Tape>& shared_tape() const { return tape_; }
  const EngineState& engine() const { return *engine_; }
  int32_t unit() const { return unit_; }
  int backward() const { return backward_; }

 private:
  void enter(std::shared_ptr<Tape> tape);

  const std::shared_ptr<EngineState> engine_;
  std::shared_ptr<Tape> tape_;  // null until a tensor has shown which device this is about
  const int32_t unit_;
  const std::string& name_;
  const int backward_;  // the pass that the scope was opened in, -1 outside of any
  int64_t begin_ns_ = 0;
  int64_t saved_ = 0;
  int64_t kept_ = 0;
};

// Makes the scope of a unit that runs now on this thread. Leaves `scope` empty where its tensors are not the engine's:
// the engine is off, there is no grad mode, they belong to another feature's region or to hooks of Python's, or
// backward is running, in which a forward is a recomputation.
void open_pack_scope(std::optional<PackScope>& scope, const std::shared_ptr<EngineState>& engine, int32_t unit,
                     const std::string& name);

// One per attached unit.
class OffloadHook final : public autograd::UnitHook {
 public:
  OffloadHook(std::shared_ptr<EngineState> engine, std::string name);

  void around_forward(const autograd::UnitCall& call, c10::function_ref<void()> body) override;
  void before_backward(const autograd::UnitCall& call) override;
  void after_backward(const autograd::UnitCall& call) override;

  const std::string& name() const { return name_; }

 private:
  const std::shared_ptr<EngineState> engine_;
  const std::string name_;
  const int32_t unit_;
};

// On what runs after the units, a final norm or a head: its backward comes before theirs, and copies can come back
// during it.
class AfterUnitsHook final : public autograd::UnitHook {
 public:
  explicit AfterUnitsHook(std::shared_ptr<EngineState> engine) : engine_(std::move(engine)) {}

  void around_forward(const autograd::UnitCall& call, c10::function_ref<void()> body) override;
  void before_backward(const autograd::UnitCall& call) override;
  bool wants_after_backward() const override { return false; }

 private:
  const std::shared_ptr<EngineState> engine_;
};

}  // namespace neap::offload
