// What the saved-tensor path costs per tensor: libtorch alone, with the proxy but no scope, below a null scope, and
// below a scope whose hooks do the least that is useful. And what a hook point costs per call of a unit.
//
//   build/release/benchmarks/hook_path_bench --benchmark_repetitions=9 --benchmark_enable_random_interleaving=true
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/version_stamp.h"

namespace neap::autograd {
namespace {

namespace ag = torch::autograd;

// Switches between libtorch's own engine and the proxy, so that both are measured in one process.
ag::Engine* g_engine = nullptr;
ag::Engine& chosen_engine() { return *g_engine; }
void use_engine(bool proxy) {
  static ag::Engine* const installed = [] {
    install_saved_tensor_hooks();
    return &ag::Engine::get_default_engine();
  }();
  g_engine = proxy ? installed : &ag::Engine::get_base_engine();
  ag::set_default_engine_stub(&chosen_engine);
}

// Keeps the data and stamps the version.
class KeepPolicy final : public SavedTensorPolicy {
 public:
  std::unique_ptr<SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(); }

 private:
  struct Hook final : SavedVariableHooks {
    void call_pack_hook(const at::Tensor& tensor) override {
      stamp = VersionStamp(tensor);
      held = tensor.variable_data();
    }
    at::Tensor call_unpack_hook() override {
      stamp.check(held.options(), held.sizes());
      return held;
    }
    at::Tensor held;
    VersionStamp stamp;
  };
};

enum Mode : int { kStock, kInactive, kNullScope, kKeep };

class ModeInForce {
 public:
  explicit ModeInForce(Mode mode) {
    use_engine(mode != kStock);
    if (mode == kNullScope) scope_.emplace(nullptr);
    if (mode == kKeep) scope_.emplace(&policy_);
  }
  ~ModeInForce() {
    scope_.reset();
    use_engine(true);
  }

 private:
  KeepPolicy policy_;
  std::optional<SavedTensorScope> scope_;
};

// One saved tensor made and destroyed.
template <Mode kMode>
void save_one_tensor(benchmark::State& state) {
  const at::Tensor leaf = at::ones({16}).set_requires_grad(true);
  const ModeInForce mode(kMode);
  for (auto _ : state) {
    const ag::SavedVariable saved(leaf, /*is_output=*/false);
    benchmark::DoNotOptimize(&saved);
  }
}
BENCHMARK(save_one_tensor<kStock>)->Name("saved_tensor/stock");
BENCHMARK(save_one_tensor<kInactive>)->Name("saved_tensor/inactive");
BENCHMARK(save_one_tensor<kNullScope>)->Name("saved_tensor/null_scope");
BENCHMARK(save_one_tensor<kKeep>)->Name("saved_tensor/keep");

// Forward and backward of a chain of operators that save one tensor each, per operator.
template <Mode kMode>
void run_chain(benchmark::State& state) {
  constexpr int kOperators = 1000;
  const at::Tensor leaf = at::ones({16}).set_requires_grad(true);
  const at::Tensor grad = at::ones({16});
  const ModeInForce mode(kMode);
  for (auto _ : state) {
    at::Tensor y = leaf;
    for (int i = 0; i < kOperators; ++i) y = y.sin();
    y.backward(grad);
  }
  state.counters["per_operator"] =
      benchmark::Counter(kOperators, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(run_chain<kStock>)->Name("chain/stock");
BENCHMARK(run_chain<kInactive>)->Name("chain/inactive");
BENCHMARK(run_chain<kNullScope>)->Name("chain/null_scope");
BENCHMARK(run_chain<kKeep>)->Name("chain/keep");

// A unit of ten operators: called directly, through an empty hook point, through one with a hook that does nothing.
enum UnitMode : int { kDirect, kEmptyPoint, kHooked };

template <UnitMode kMode>
void run_unit(benchmark::State& state) {
  use_engine(true);
  const at::Tensor leaf = at::ones({16}).set_requires_grad(true);
  const at::Tensor grad = at::ones({16});
  HookPoint point;
  HookHandle handle;
  if (kMode == kHooked) handle = point.attach(std::make_shared<UnitHook>(), HookOrder::kOffload);
  const auto body = [&] {
    at::Tensor y = leaf;
    for (int i = 0; i < 10; ++i) y = y.sin();
    return y;
  };
  for (auto _ : state) {
    const at::Tensor y = kMode == kDirect ? body() : point.run({leaf}, body);
    y.backward(grad);
  }
}
BENCHMARK(run_unit<kDirect>)->Name("unit/direct");
BENCHMARK(run_unit<kEmptyPoint>)->Name("unit/empty_hook_point");
BENCHMARK(run_unit<kHooked>)->Name("unit/hooked");

}  // namespace
}  // namespace neap::autograd

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
