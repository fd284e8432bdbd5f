#include "neap/offload/unit_hook.h"

#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

#include "neap/autograd/graph_task.h"
#include "neap/autograd/op_name.h"

namespace neap::offload {

PackScope::PackScope(std::shared_ptr<EngineState> engine, const std::shared_ptr<Tape>& within, int32_t unit,
                     const std::string& name)
    : engine_(std::move(engine)), unit_(unit), name_(name), backward_(autograd::current_backward()) {
  enter(engine_->enter(unit, within));
}

void PackScope::enter(std::shared_ptr<Tape> tape) {
  tape_ = std::move(tape);
  if (tape_ != nullptr) begin_ns_ = tape_->link().device().now_ns();
}

PackScope::~PackScope() { engine_->leave(unit_, begin_ns_, saved_, kept_); }

std::unique_ptr<autograd::SavedVariableHooks> PackScope::make_hook() {
  if (autograd::current_backward() != backward_) [[unlikely]]
    return nullptr;
  return std::make_unique<PackedView>(*this);
}

bool PackScope::may_leave(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.numel() == 0) return false;
  if (tensor.storage().nbytes() < static_cast<size_t>(engine_->options.min_bytes.count)) return false;
  if (tape_ == nullptr) [[unlikely]] {
    if (!tensor.is_floating_point() && !tensor.is_complex()) return false;
    engine_->adopt_device(tensor.device());
    enter(engine_->enter(unit_, nullptr));
    if (tape_ == nullptr) return false;
  }
  // Tensors of a plain CPU carry no index.
  const c10::Device device = tensor.device();
  if (device.type() != tape_->device().type() || (device.has_index() && device != tape_->device())) {
    // Adopted was that of a number on the CPU, say; the next pass knows better.
    if (tape_->device().is_cpu()) engine_->adopt_device(device);
    return false;
  }
  if (engine_->residents.is_resident(tensor)) return false;
  const Policy& policy = engine_->options.policy;
  return !policy || policy(tensor, name_, autograd::current_op_name()) == Decision::kOffload;
}

OffloadHook::OffloadHook(std::shared_ptr<EngineState> engine, std::string name)
    : engine_(std::move(engine)), name_(std::move(name)), unit_(engine_->add_unit(name_)) {}

void open_pack_scope(std::optional<PackScope>& scope, const std::shared_ptr<EngineState>& engine, int32_t unit,
                     const std::string& name) {
  if (engine->options.mode == Mode::kOff || !c10::GradMode::is_enabled()) return;
  if (autograd::SavedTensorScope::python_wins()) return;
  std::shared_ptr<Tape> within;
  if (const auto* surrounding = autograd::SavedTensorScope::current()) {
    const auto* outer = dynamic_cast<const PackScope*>(surrounding->policy());
    // Inside another feature's region, say one that is being recomputed: what is saved here is that feature's.
    if (outer == nullptr) return;
    if (outer->backward() != autograd::current_backward()) return;
    if (&outer->engine() == engine.get()) within = outer->shared_tape();
  } else if (autograd::current_backward() != autograd::kNoBackward) {
    return;
  }
  if (!engine->active()) return;
  if (within == nullptr) engine->refresh_model(unit);
  scope.emplace(engine, within, unit, name);
}

void OffloadHook::around_forward(const autograd::UnitCall& /*call*/, c10::function_ref<void()> body) {
  std::optional<PackScope> policy;
  open_pack_scope(policy, engine_, unit_, name_);
  if (!policy) return body();
  std::optional<autograd::OpNames> names;
  if (engine_->options.policy) names.emplace();
  const autograd::SavedTensorScope scope(&*policy);
  body();
}

void OffloadHook::before_backward(const autograd::UnitCall& /*call*/) { engine_->begin_backward(unit_); }
void OffloadHook::after_backward(const autograd::UnitCall& /*call*/) { engine_->end_backward(unit_); }

void AfterUnitsHook::around_forward(const autograd::UnitCall& call, c10::function_ref<void()> body) {
  body();
  if (!c10::GradMode::is_enabled() || autograd::current_backward() != autograd::kNoBackward) return;
  engine_->after_units(call.id);
}

void AfterUnitsHook::before_backward(const autograd::UnitCall& call) { engine_->before_units(call.id); }

}  // namespace neap::offload
