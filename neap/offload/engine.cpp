#include "neap/offload/engine.h"

#include <torch/csrc/api/include/torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/named_hook_points.h"
#include "neap/autograd/op_name.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/offload/engine_state.h"
#include "neap/offload/unit_hook.h"

namespace neap::offload {
namespace {

struct AttachedUnit {
  autograd::HookPoint* point;
  size_t order;  // in the model
  std::shared_ptr<OffloadHook> hook;
  autograd::HookHandle handle;
};

}  // namespace

class Engine::Impl {
 public:
  Impl(Options options, Resources resources)
      : state_(std::make_shared<EngineState>(std::move(options), std::move(resources))) {}

  ~Impl() {
    detach();
    state_->disconnect();
  }

  void attach(const autograd::ModelUnits& model) {
    const MutexLock lock(mutex_);
    // Of hook points that have gone others may have the address.
    std::erase_if(attached_, [](const AttachedUnit& unit) { return !unit.handle.attached(); });
    check_model(model.identity);
    check_count(model.units);

    state_->set_model(model.parameters_and_buffers, model.list_again);
    model_ = model.identity;
    for (const auto& point : model.units) attach_unit(point);
    std::ranges::sort(attached_, {}, &AttachedUnit::order);
    attach_after_units(model.after_units);
  }

  void check_model(const void* identity) const NEAP_REQUIRES(mutex_) {
    NEAP_CHECK(attached_.empty() || model_ == identity,
               "[offload] expected the model that this engine is attached to; found another; use an engine per model");
  }

  void detach() noexcept {
    const MutexLock lock(mutex_);
    attached_.clear();
    after_units_.clear();
    model_ = nullptr;
    state_->stop();
  }

  std::vector<std::string> unit_names() const {
    const MutexLock lock(mutex_);
    std::vector<std::string> names;
    for (const AttachedUnit& unit : attached_) names.push_back(unit.hook->name());
    return names;
  }

  EngineState& state() const { return *state_; }

  // Opens a scope of this engine on this thread; nullopt where nothing may be offloaded.
  void open_scope(std::optional<PackScope>& policy) {
    int32_t unit = 0;
    {
      const MutexLock lock(mutex_);
      if (!scope_unit_) scope_unit_ = state_->add_unit(kScopeName);
      unit = *scope_unit_;
    }
    open_pack_scope(policy, state_, unit, kScopeName);
  }

 private:
  inline static const std::string kScopeName = "scope";

  bool is_attached(const autograd::HookPoint* point) const {
    return std::ranges::find(attached_, point, &AttachedUnit::point) != attached_.end();
  }

  // Before anything is attached, so that an engine is never left half attached.
  void check_count(const std::vector<autograd::NamedHookPoint>& chosen) const {
    if (attached_.empty() && chosen.empty()) return;  // the engine serves scopes alone
    auto count = static_cast<int64_t>(attached_.size());
    for (const auto& point : chosen) count += is_attached(point.point) ? 0 : 1;
    validate(state_->options, count);
  }

  // A module under two names, or chosen by two patterns, is one unit.
  void attach_unit(const autograd::NamedHookPoint& point) {
    if (is_attached(point.point)) return;
    auto hook = std::make_shared<OffloadHook>(state_, point.name);
    auto handle = point.point->attach(hook, autograd::HookOrder::kOffload);
    attached_.push_back({point.point, point.order, std::move(hook), std::move(handle)});
  }

  void attach_after_units(const std::vector<autograd::NamedHookPoint>& points) {
    after_units_.clear();
    const auto hook = std::make_shared<AfterUnitsHook>(state_);
    for (const auto& point : points) {
      if (is_attached(point.point)) continue;
      after_units_.push_back(point.point->attach(hook, autograd::HookOrder::kOffload));
    }
  }

  const std::shared_ptr<EngineState> state_;
  mutable Mutex mutex_;
  const void* model_ NEAP_GUARDED_BY(mutex_) = nullptr;
  std::optional<int32_t> scope_unit_ NEAP_GUARDED_BY(mutex_);
  std::vector<AttachedUnit> attached_ NEAP_GUARDED_BY(mutex_);
  std::vector<autograd::HookHandle> after_units_ NEAP_GUARDED_BY(mutex_);
};

Engine::Engine(Options options, Resources resources) {
  validate(options);
  impl_ = std::make_unique<Impl>(std::move(options), std::move(resources));
}
Engine::~Engine() = default;

void Engine::attach(torch::nn::Module& model, const std::vector<std::string>& patterns) {
  impl_->attach(autograd::select_model_units(model, patterns, "offload"));
}
void Engine::attach(const autograd::ModelUnits& model) { impl_->attach(model); }
void Engine::detach() noexcept { impl_->detach(); }
std::vector<std::string> Engine::unit_names() const { return impl_->unit_names(); }
const Options& Engine::options() const noexcept { return impl_->state().options; }
StepReport Engine::take_step_report() { return impl_->state().take_report(); }
memory::PoolCounters Engine::host_counters() const { return impl_->state().host_counters(); }

// Destroyed from its end: the scope is closed before what answers for it.
struct Scope::Open {
  const std::thread::id thread = std::this_thread::get_id();
  std::optional<PackScope> policy;
  std::optional<autograd::OpNames> names;
  std::optional<autograd::SavedTensorScope> scope;
};

Scope::Scope(Engine& engine) : open_(std::make_unique<Open>()) {
  engine.impl_->open_scope(open_->policy);
  if (!open_->policy) return;
  if (engine.options().policy) open_->names.emplace();
  open_->scope.emplace(&*open_->policy);
}
Scope::~Scope() {
  if (!open_->scope || open_->thread == std::this_thread::get_id()) return;
  (void)open_.release();  // the other thread goes through it whenever it saves a tensor
  log_error(
      "[offload] expected a scope to be left on the thread that entered it; found it left on another; what that thread "
      "saves is offloaded from now on; begin and end a scope on one thread");
}

}  // namespace neap::offload
