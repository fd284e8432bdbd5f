#include "neap/recompute/recompute.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/named_hook_points.h"
#include "neap/base/error.h"
#include "neap/base/mutex.h"
#include "neap/recompute/internal/environment.h"
#include "neap/recompute/internal/region_state.h"

namespace neap::recompute {
namespace {

// One per attached unit.
class RecomputeHook final : public autograd::UnitHook {
 public:
  RecomputeHook(std::shared_ptr<internal::Shared> shared, internal::RegionLabel label)
      : shared_(std::move(shared)), label_(std::move(label)) {}

  void around_repeatable(const autograd::UnitCall& /*call*/, const autograd::UnitForward& forward) override {
    if (!c10::GradMode::is_enabled()) return forward.body()();
    autograd::Rerun again = forward.again();
    NEAP_CHECK(again != nullptr, "[recompute] unit '", label_.name,
               "': expected a body that can run again; found one that takes no inputs; the module's forward has to "
               "call hook_point().run(*this, {inputs…}, &Module::body)");
    ran_.store(true, std::memory_order_relaxed);
    internal::run_region(label_, shared_, forward.inputs(), forward.body(), std::move(again));
  }

  const std::string& name() const { return label_.name; }
  // Since the last call.
  bool take_ran() { return ran_.exchange(false, std::memory_order_relaxed); }

 private:
  const std::shared_ptr<internal::Shared> shared_;
  const internal::RegionLabel label_;
  std::atomic<bool> ran_ = false;
};

struct AttachedUnit {
  autograd::HookPoint* point;
  std::size_t order;  // in the model
  std::shared_ptr<RecomputeHook> hook;
  autograd::HookHandle handle;
};

}  // namespace

class Recompute::Impl {
 public:
  Impl(const Options& options, trace::Recorder* recorder)
      : shared_(std::make_shared<internal::Shared>(options, recorder)) {}

  ~Impl() {
    detach();
    const MutexLock lock(shared_->recording);
    shared_->recorder = nullptr;
  }

  void attach(torch::nn::Module& model, const std::vector<std::string>& patterns) {
    const MutexLock lock(mutex_);
    // Of hook points that have gone others may have the address.
    std::erase_if(attached_, [](const AttachedUnit& unit) { return !unit.handle.attached(); });
    NEAP_CHECK(attached_.empty() || model_ == &model,
               "[recompute] expected the model that this object is attached to; found another; use one per model");
    const auto chosen = autograd::select_hook_points(model, patterns, "recompute");
    model_ = &model;
    const std::vector<at::Tensor> residents = autograd::parameters_and_buffers(model);
    for (const at::Tensor& tensor : residents) shared_->residents.add(tensor);
    const auto devices = internal::devices_of(residents, {});
    for (const autograd::NamedHookPoint& point : chosen) attach_unit(point, devices);
    std::ranges::sort(attached_, {}, &AttachedUnit::order);
  }

  void detach() noexcept {
    const MutexLock lock(mutex_);
    attached_.clear();
    model_ = nullptr;
  }

  std::vector<std::string> unit_names() const {
    const MutexLock lock(mutex_);
    std::vector<std::string> names;
    for (const AttachedUnit& unit : attached_) names.push_back(unit.hook->name());
    return names;
  }

  StepReport take_step_report() {
    StepReport report;
    const auto take = [](std::atomic<int64_t>& count) { return count.exchange(0, std::memory_order_relaxed); };
    report.regions = take(shared_->regions);
    report.reruns = take(shared_->reruns);
    report.saved_tensors = take(shared_->saved_tensors);
    report.bytes_not_kept = Bytes(take(shared_->bytes_not_kept));
    const MutexLock lock(mutex_);
    for (const AttachedUnit& unit : attached_) {
      if (!unit.hook->take_ran()) report.idle_units.push_back(unit.hook->name());
    }
    return report;
  }

  const Options& options() const { return shared_->options; }

 private:
  // A module under two names, or chosen by two patterns, is one unit.
  void attach_unit(const autograd::NamedHookPoint& point, const std::vector<c10::Device>& devices) {
    const auto known = [&](const AttachedUnit& unit) { return unit.point == point.point; };
    if (std::ranges::any_of(attached_, known)) return;
    auto hook = std::make_shared<RecomputeHook>(shared_, internal::RegionLabel{point.name, devices});
    auto handle = point.point->attach(hook, autograd::HookOrder::kRecompute);
    attached_.push_back({point.point, point.order, std::move(hook), std::move(handle)});
  }

  const std::shared_ptr<internal::Shared> shared_;
  mutable Mutex mutex_;
  const torch::nn::Module* model_ NEAP_GUARDED_BY(mutex_) = nullptr;  // compared only, never followed
  std::vector<AttachedUnit> attached_ NEAP_GUARDED_BY(mutex_);
};

Recompute::Recompute(Options options, trace::Recorder* recorder) : impl_(std::make_unique<Impl>(options, recorder)) {}
Recompute::~Recompute() = default;

void Recompute::attach(torch::nn::Module& model, const std::vector<std::string>& patterns) {
  impl_->attach(model, patterns);
}
void Recompute::detach() noexcept { impl_->detach(); }
std::vector<std::string> Recompute::unit_names() const { return impl_->unit_names(); }
const Options& Recompute::options() const noexcept { return impl_->options(); }
StepReport Recompute::take_step_report() { return impl_->take_step_report(); }

}  // namespace neap::recompute
