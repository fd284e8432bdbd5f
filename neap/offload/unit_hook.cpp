#include "neap/offload/unit_hook.h"

#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

#include "neap/autograd/op_name.h"

namespace neap::offload {

PackScope::PackScope(EngineState& engine, const std::shared_ptr<Tape>& within, int32_t unit, const std::string& name)
    : engine_(engine), unit_(unit), name_(name) {
  enter(engine.enter(unit, within));
}

void PackScope::enter(std::shared_ptr<Tape> tape) {
  tape_ = std::move(tape);
  if (tape_ != nullptr) begin_ns_ = tape_->link().device().now_ns();
}

PackScope::~PackScope() { engine_.leave(unit_, begin_ns_, saved_, kept_); }

bool PackScope::may_leave(const at::Tensor& tensor) {
  if (tape_ == nullptr) [[unlikely]] {
    if (!tensor.is_floating_point()) return false;
    engine_.adopt_device(tensor.device());
    enter(engine_.enter(unit_, nullptr));
    if (tape_ == nullptr) return false;
  }
  // Tensors of a plain CPU carry no index.
  const c10::Device device = tensor.device();
  if (device.type() != tape_->device().type() || (device.has_index() && device != tape_->device())) return false;
  if (!is_plain(tensor) || tensor.numel() == 0) return false;
  if (tensor.storage().nbytes() < static_cast<size_t>(engine_.options.min_bytes.count)) return false;
  if (engine_.residents.is_resident(tensor)) return false;
  const Policy& policy = engine_.options.policy;
  return !policy || policy(tensor, name_, autograd::current_op_name()) == Decision::kOffload;
}

OffloadHook::OffloadHook(std::shared_ptr<EngineState> engine, std::string name)
    : engine_(std::move(engine)), name_(std::move(name)), unit_(engine_->add_unit(name_)) {}

void OffloadHook::around_forward(const autograd::UnitCall& /*call*/, c10::function_ref<void()> body) {
  if (engine_->options.mode == Mode::kOff || !c10::GradMode::is_enabled()) return body();
  std::shared_ptr<Tape> within;
  if (const auto* surrounding = autograd::SavedTensorScope::current()) {
    const auto* scope = dynamic_cast<const PackScope*>(surrounding->policy());
    // Inside another feature's region, say one that is being recomputed: what is saved here is that feature's.
    if (scope == nullptr) return body();
    if (&scope->engine() == engine_.get()) within = scope->shared_tape();
  }
  if (!engine_->active()) return body();
  PackScope policy(*engine_, within, unit_, name_);
  std::optional<autograd::OpNames> names;
  if (engine_->options.policy) names.emplace();
  const autograd::SavedTensorScope scope(&policy);
  body();
}

void OffloadHook::before_backward(const autograd::UnitCall& /*call*/) { engine_->begin_backward(unit_); }
void OffloadHook::after_backward(const autograd::UnitCall& /*call*/) { engine_->end_backward(unit_); }

}  // namespace neap::offload
