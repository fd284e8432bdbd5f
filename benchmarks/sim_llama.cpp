#include "benchmarks/sim_llama.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/base/error.h"
#include "neap/device/device.h"
#include "neap/models/causal_lm.h"
#include "neap/sim/loader.h"

namespace neap::bench {
namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

sim::Control& loaded_sim() {
  static sim::Control& control = []() -> sim::Control& {
    sim::Control& loaded = sim::load();
    device::set_clock(kDevice.type(), [&loaded](c10::DeviceIndex index) { return loaded.host_time_ns(index); });
    return loaded;
  }();
  return control;
}

void synchronize() { c10::impl::VirtualGuardImpl(kDevice.type()).synchronizeDevice(0); }

struct Batch {
  at::Tensor ids, labels;
};

Batch batch_of(const Workload& w, int64_t number) {
  auto generator = at::detail::createCPUGenerator(100 + static_cast<uint64_t>(number));
  const at::Tensor rows = at::randint(0, w.vocabulary, {w.batch, w.sequence + 1}, generator, at::kLong);
  return {rows.slice(1, 0, w.sequence).contiguous().to(kDevice), rows.slice(1, 1).contiguous().to(kDevice)};
}

std::shared_ptr<models::CausalLM> make_model(const Workload& w) {
  models::ModelConfig config;
  config.vocab_size = w.vocabulary;
  config.hidden_size = w.width;
  config.intermediate_size = w.mlp_width;
  config.num_hidden_layers = w.layers;
  config.num_attention_heads = config.num_key_value_heads = w.heads;
  config.head_dim = w.width / w.heads;
  return models::make_model(config, at::TensorOptions(at::kFloat).device(kDevice));
}

struct ApplyGradient final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    const at::NoGradGuard no_grad;
    at::Tensor(parameter).add_(parameter.grad(), -0.02);
    parameter.mutable_grad().reset();
  }
};

Step run_step(models::CausalLM& model, const Batch& batch, offload::Engine* engine) {
  sim::Control& control = loaded_sim();
  synchronize();
  control.reset_peak(0);
  control.reset_counters(0);
  const int64_t base = control.memory(0).requested;
  const int64_t pinned = control.pinned_memory().allocations;
  const int64_t begin = control.host_time_ns(0);
  at::Tensor loss = model.loss(batch.ids, batch.labels, {.chunk_tokens = 256});
  loss.backward();
  synchronize();
  Step step;
  step.ns = control.host_time_ns(0) - begin;
  step.activation_peak = control.memory(0).requested_peak - base;
  step.counters = control.counters(0);
  step.host_allocations = control.pinned_memory().allocations - pinned;
  step.loss = loss.item<float>();
  loss.reset();
  step.left_over = control.memory(0).requested - base;
  if (engine != nullptr) step.report = engine->take_step_report();
  return step;
}

// Counts and keeps.
class CountingPolicy final : public autograd::SavedTensorPolicy {
 public:
  CountingPolicy(const std::vector<at::Tensor>& parameters, int64_t min_bytes) : min_bytes_(min_bytes) {
    for (const at::Tensor& parameter : parameters) seen_.insert(parameter.storage().unsafeGetStorageImpl());
  }
  std::unique_ptr<autograd::SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(*this); }
  int64_t bytes() const { return bytes_; }

 private:
  struct Hook final : autograd::SavedVariableHooks {
    explicit Hook(CountingPolicy& policy) : policy_(policy) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      held_ = tensor.variable_data();
      const auto size = static_cast<int64_t>(tensor.storage().nbytes());
      if (size < policy_.min_bytes_) return;
      if (policy_.seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) policy_.bytes_ += size;
    }
    at::Tensor call_unpack_hook() override { return held_; }

   private:
    CountingPolicy& policy_;
    at::Tensor held_;
  };

  const int64_t min_bytes_;
  int64_t bytes_ = 0;
  std::unordered_set<const c10::StorageImpl*> seen_;
};

struct CountingHook final : autograd::UnitHook {
  explicit CountingHook(CountingPolicy& counted) : policy(counted) {}
  void around_forward(const autograd::UnitCall& /*call*/, c10::function_ref<void()> body) override {
    const autograd::SavedTensorScope scope(&policy);
    body();
  }
  CountingPolicy& policy;
};

}  // namespace

Training train_on_sim(const Workload& workload, Speeds speeds, int64_t steps,
                      const std::optional<offload::Options>& offload, trace::Recorder* recorder) {
  sim::Control& control = loaded_sim();
  sim::DeviceConfig config;
  config.gflops = speeds.gflops;
  config.d2h_gbps = config.h2d_gbps = speeds.link_gbps;
  config.hazard_check = true;
  control.configure(config);

  Training training;
  const auto model = make_model(workload);
  for (const at::Tensor& parameter : model->parameters()) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<ApplyGradient>());
  }
  std::optional<offload::Engine> engine;
  if (offload) {
    engine.emplace(*offload, offload::Resources{.pool = nullptr, .recorder = recorder});
    engine->attach(*model);
  }
  for (int64_t i = 0; i < steps; ++i) {
    if (i == steps - 1) control.set_recorder(recorder);
    training.steps.push_back(run_step(*model, batch_of(workload, i), engine ? &*engine : nullptr));
  }
  control.set_recorder(nullptr);
  for (const at::Tensor& parameter : model->parameters()) training.parameters.push_back(parameter.detach().cpu());
  const auto hazards = control.take_hazards();
  NEAP_CHECK(hazards.empty(), "the hazard checker found ", hazards.size(), ", the first: ", hazards.front());
  return training;
}

int64_t eligible_bytes(const Workload& workload, int64_t min_bytes) {
  loaded_sim();
  const auto model = make_model(workload);
  CountingPolicy policy(model->parameters(), min_bytes);
  std::vector<autograd::HookHandle> handles;
  for (const auto& module : model->modules()) {
    if (dynamic_cast<const models::DecoderLayer*>(module.get()) == nullptr) continue;
    auto& layer = dynamic_cast<models::DecoderLayer&>(*module);
    handles.push_back(layer.hook_point().attach(std::make_shared<CountingHook>(policy), autograd::HookOrder::kOffload));
  }
  const Batch batch = batch_of(workload, 0);
  const at::Tensor loss = model->loss(batch.ids, batch.labels);  // keeps the graph, and with it every address
  return policy.bytes();
}

}  // namespace neap::bench
