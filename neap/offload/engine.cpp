#include "neap/offload/engine.h"

#include <torch/csrc/api/include/torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/named_hook_points.h"
#include "neap/base/error.h"
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

  void attach(torch::nn::Module& model, const std::vector<std::string>& patterns) {
    const MutexLock lock(mutex_);
    NEAP_CHECK(attached_.empty() || model_ == &model,
               "[offload] expected the model that this engine is attached to; found another; use an engine per model");
    const auto chosen = autograd::select_hook_points(model, patterns, "offload");
    check_count(chosen);

    state_->set_model(autograd::parameters_and_buffers(model));
    model_ = &model;
    for (const auto& point : chosen) attach_unit(point);
    std::ranges::sort(attached_, {}, &AttachedUnit::order);
  }

  void detach() noexcept {
    const MutexLock lock(mutex_);
    attached_.clear();
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

 private:
  bool is_attached(const autograd::HookPoint* point) const {
    return std::ranges::find(attached_, point, &AttachedUnit::point) != attached_.end();
  }

  // Before anything is attached, so that an engine is never left half attached.
  void check_count(const std::vector<autograd::NamedHookPoint>& chosen) const {
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

  const std::shared_ptr<EngineState> state_;
  mutable Mutex mutex_;
  const torch::nn::Module* model_ NEAP_GUARDED_BY(mutex_) = nullptr;  // compared only, never followed
  std::vector<AttachedUnit> attached_ NEAP_GUARDED_BY(mutex_);
};

Engine::Engine(Options options, Resources resources) {
  validate(options);
  impl_ = std::make_unique<Impl>(std::move(options), std::move(resources));
}
Engine::~Engine() = default;

void Engine::attach(torch::nn::Module& model, const std::vector<std::string>& patterns) {
  impl_->attach(model, patterns);
}
void Engine::detach() noexcept { impl_->detach(); }
std::vector<std::string> Engine::unit_names() const { return impl_->unit_names(); }
const Options& Engine::options() const noexcept { return impl_->state().options; }
StepReport Engine::take_step_report() { return impl_->state().take_report(); }
memory::PoolCounters Engine::host_counters() const { return impl_->state().host_counters(); }

}  // namespace neap::offload
