#include "neap/recompute/internal/region_state.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "neap/autograd/detached_alias.h"
#include "neap/autograd/op_name.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/device/device.h"
#include "neap/trace/recorder.h"

namespace neap::recompute::internal {

namespace ag = torch::autograd;
using autograd::SavedVariableHooks;

namespace {

// Thrown out of a pack hook to leave the region early. No std::exception: the region's code should not catch it.
struct StopRerun {};

// Takes what the second run saves, in order.
class CapturePolicy final : public autograd::SavedTensorPolicy {
 public:
  CapturePolicy(std::size_t expected, bool early_stop) : expected_(expected), early_stop_(early_stop) {
    captured.reserve(expected);
  }
  std::unique_ptr<SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(*this); }

  std::vector<Captured> captured;
  std::size_t surplus = 0;

 private:
  // The graph of the second run is thrown away, mostly unused: only a unit that differentiates itself unpacks from it.
  class Hook final : public SavedVariableHooks {
   public:
    explicit Hook(CapturePolicy& policy) : policy_(&policy) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      kept_ = Captured(tensor);
      std::exchange(policy_, nullptr)->take(kept_);
    }
    at::Tensor call_unpack_hook() override {
      kept_.version.check(kept_.tensor);
      return kept_.tensor;
    }

   private:
    CapturePolicy* policy_;
    Captured kept_;
  };

  void take(const Captured& tensor) {
    if (captured.size() < expected_) {
      captured.push_back(tensor);
    } else if (!early_stop_) {
      ++surplus;
    }
    // Again and again, if the unit's code swallows it.
    if (early_stop_ && captured.size() == expected_) throw StopRerun{};
  }

  const std::size_t expected_;
  const bool early_stop_;
};

// Open while a region runs for the first time.
class PlaceholderPolicy final : public autograd::SavedTensorPolicy {
 public:
  // `counted`: whether this run is one of the user's, not a part of a second run.
  PlaceholderPolicy(std::shared_ptr<RegionState> region, Shared& shared, at::ArrayRef<at::Tensor> inputs, bool counted)
      : region_(std::move(region)), shared_(shared), counted_(counted) {
    if (!counted) return;
    for (const at::Tensor& input : inputs) seen_.add(input);
  }
  std::unique_ptr<SavedVariableHooks> make_hook() override { return std::make_unique<Placeholder>(*this); }

 private:
  // Stands where the saved tensor would be.
  class Placeholder final : public SavedVariableHooks {
   public:
    explicit Placeholder(PlaceholderPolicy& policy) : policy_(&policy), region_(policy.region_) {}
    ~Placeholder() override {
      if (index_) region_->release(*index_);
    }
    void call_pack_hook(const at::Tensor& tensor) override {
      index_ = region_->add(tensor);
      std::exchange(policy_, nullptr)->count(tensor);
    }
    at::Tensor call_unpack_hook() override { return region_->get(*index_); }

   private:
    PlaceholderPolicy* policy_;
    const std::shared_ptr<RegionState> region_;
    std::optional<std::size_t> index_;
  };

  void count(const at::Tensor& tensor) {
    if (!counted_) return;
    shared_.saved_tensors.fetch_add(1, std::memory_order_relaxed);
    if (!tensor.has_storage() || seen_.is_resident(tensor) || shared_.residents.contains(tensor)) return;
    seen_.add(tensor);
    shared_.bytes_not_kept.fetch_add(static_cast<int64_t>(tensor.storage().nbytes()), std::memory_order_relaxed);
  }

  const std::shared_ptr<RegionState> region_;
  Shared& shared_;
  const bool counted_;
  autograd::ResidentStorages seen_;  // the inputs' storages and those that are counted already
};

// Operators are observed where messages will name them.
std::optional<autograd::OpNames> observe_operators(const Options& options) {
  return options.debug ? std::optional<autograd::OpNames>(std::in_place) : std::nullopt;
}

}  // namespace

// Held by the graph task in the form of a callback, so it goes with the pass, however that ends.
struct RegionState::RunEnd {
  std::weak_ptr<RegionState> region;
  int task;
  ~RunEnd() { run(); }
  void run() noexcept {
    if (const auto alive = region.lock()) alive->forget(task);
  }
};

RegionState::RegionState(const RegionLabel& label, std::shared_ptr<Shared> shared, at::ArrayRef<at::Tensor> inputs,
                         autograd::Rerun again)
    : name_(label.name),
      shared_(std::move(shared)),
      environment_(devices_of(inputs, label.devices)),
      again_(std::move(again)) {
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs) save_input(input);
  if (shared_->options.preserve_rng) generators_ = GeneratorStates(environment_.devices());
}

void RegionState::save_input(const at::Tensor& input) {
  Input& slot = inputs_.emplace_back();
  if (!input.defined() || input.is_inference()) {
    slot.kept = input;
    return;
  }
  slot.requires_grad = input.requires_grad();
  // Detached, for the region shall not hold the graph that made its input. A leaf has none, and by its look offload
  // knows a parameter.
  const bool leaf = input.is_leaf() && input.requires_grad();
  slot.saved = ag::SavedVariable(leaf ? input : autograd::detached_alias(input), /*is_output=*/false);
}

std::size_t RegionState::add(const at::Tensor& tensor) {
  SavedTensor saved(tensor, shared_->options.debug);
  const c10::Device device = tensor.device();
  const auto& known = environment_.devices();
  NEAP_CHECK(!shared_->options.preserve_rng || device.is_cpu() || device.is_meta() ||
                 std::find(known.begin(), known.end(), device) != known.end(),
             "[recompute] unit '", name_, "': expected tensors of the CPU and of its inputs' devices; found one of ",
             device,
             ", whose random numbers could not be repeated; give the unit an input there, name the device in "
             "RegionOptions::devices, or set preserve_rng to false");
  const MutexLock lock(mutex_);
  saved_.push_back(std::move(saved));
  released_.push_back(false);
  return saved_.size() - 1;
}

void RegionState::forward_done() {
  generators_.keep_used();
  complete_ = true;
}

std::vector<at::Tensor> RegionState::fresh_inputs() {
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (Input& input : inputs_) {
    if (!input.kept.defined()) {
      const at::Tensor saved = input.saved.unpack();
      inputs.push_back(saved.defined() ? saved.detach().set_requires_grad(input.requires_grad) : saved);
    } else {
      inputs.push_back(input.kept);
    }
  }
  return inputs;
}

std::vector<Captured> RegionState::run_again() {
  device::Device& device = device::Device::of(environment_.devices().back());
  const int64_t begin_ns = device.now_ns();
  const Options& options = shared_->options;
  const bool early_stop = options.early_stop && !options.debug;
  CapturePolicy capture(saved_.size(), early_stop);
  {
    const Environment::Streams streams(environment_);
    const std::vector<at::Tensor> inputs = fresh_inputs();
    const Environment::Modes modes(environment_);
    const GeneratorRewind rewind(generators_);
    const autograd::RunningAgain mark;
    const auto operators = observe_operators(options);
    const autograd::SavedTensorScope scope(&capture);
    try {
      again_(inputs);
    } catch (const StopRerun&) {
    }
  }
  // While the first run is under way, the second one gets further than it.
  check_second_run(name_, saved_, capture.captured, complete_ ? capture.surplus : 0);
  shared_->reruns.fetch_add(1, std::memory_order_relaxed);
  {
    const MutexLock lock(shared_->recording);  // until the span is written nobody lets the recorder go
    if (trace::Recorder* recorder = shared_->recorder) {
      recorder->span("recompute/second runs", name_, begin_ns, device.now_ns(), {{"tensors", saved_.size()}});
    }
  }
  return std::move(capture.captured);
}

at::Tensor RegionState::check_unchanged(const Captured& captured, std::size_t index) const {
  const SavedTensor& first = saved_[index];
  first.version.check(first.options, first.sizes);
  captured.version.check(captured.tensor);
  return captured.tensor;
}

at::Tensor RegionState::get(std::size_t index) {
  const int task = ag::get_current_graph_task_id();
  if (task < 0) return check_unchanged(run_again()[index], index);  // unpacked outside of any pass
  const std::shared_ptr<Run> run = run_of(task, index);
  const MutexLock lock(mutex_);
  // A graph that is kept destroys no placeholder, so the tensor has to go now; else release() is told when.
  if (!ag::get_current_graph_task_keep_graph()) return check_unchanged(run->tensors[index], index);
  return check_unchanged(std::exchange(run->tensors[index], {}), index);
}

// The pass's run, which has the tensor.
std::shared_ptr<RegionState::Run> RegionState::run_of(int task, std::size_t index) {
  auto run = std::make_shared<Run>();
  run->thread = std::this_thread::get_id();
  {
    const MutexLock lock(mutex_);
    const auto settled = [&]() NEAP_REQUIRES(mutex_) {
      const auto known = runs_.find(task);
      return known == runs_.end() || known->second->ready || known->second->thread == run->thread;
    };
    changed_.wait(mutex_, settled);  // for another thread of this pass that runs the region
    if (const auto known = runs_.find(task); known != runs_.end()) {
      NEAP_CHECK(known->second->ready, "[recompute] unit '", name_,
                 "': expected a second run that does not need its own result; found one that runs backward over the "
                 "pass it belongs to");
      if (known->second->tensors[index].tensor.defined()) return known->second;
    }
    runs_[task] = run;
  }
  ScopeExit failed([&] {
    const MutexLock lock(mutex_);
    if (const auto known = runs_.find(task); known != runs_.end() && known->second == run) runs_.erase(known);
    changed_.notify_all();
  });
  const auto end = std::make_shared<RunEnd>(weak_from_this(), task);
  ag::Engine::get_default_engine().queue_callback([end] { end->run(); });
  publish(*run, run_again());
  failed.dismiss();
  return run;
}

void RegionState::publish(Run& run, std::vector<Captured> tensors) {
  std::vector<Captured> unwanted;  // freed outside of the lock
  const MutexLock lock(mutex_);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (released_[i]) unwanted.push_back(std::exchange(tensors[i], {}));
  }
  run.tensors = std::move(tensors);
  run.ready = true;
  changed_.notify_all();
}

void RegionState::release(std::size_t index) noexcept {
  std::vector<Captured> freed;  // outside of the lock
  const MutexLock lock(mutex_);
  released_[index] = true;
  for (auto& [task, run] : runs_) {
    if (index < run->tensors.size()) freed.push_back(std::exchange(run->tensors[index], {}));
  }
}

void RegionState::forget(int task) noexcept {
  std::shared_ptr<Run> freed;  // outside of the lock
  const MutexLock lock(mutex_);
  const auto known = runs_.find(task);
  if (known == runs_.end() || !known->second->ready) return;
  freed = std::move(known->second);
  runs_.erase(known);
}

void run_region(const RegionLabel& label, const std::shared_ptr<Shared>& shared, at::ArrayRef<at::Tensor> inputs,
                c10::function_ref<void()> forward, autograd::Rerun again) {
  const bool counted = !autograd::running_again();
  if (counted) shared->regions.fetch_add(1, std::memory_order_relaxed);
  // Before the scope opens: the inputs go to whoever surrounds the region.
  const auto region = std::make_shared<RegionState>(label, shared, inputs, std::move(again));
  PlaceholderPolicy placeholders(region, *shared, inputs, counted);
  {
    const auto operators = observe_operators(shared->options);
    const autograd::SavedTensorScope scope(&placeholders);
    forward();
  }
  region->forward_done();
}

}  // namespace neap::recompute::internal
