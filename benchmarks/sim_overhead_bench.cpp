// What an operator costs on sim beyond the CPU's kernel that it runs: microseconds on the calling thread, for operators
// small enough to be all overhead. CPU and sim take turns, and the best of many rounds counts, so that a busy machine
// disturbs little. Prints one line an operator and the figures as JSON.
//
//   build/release/benchmarks/sim_overhead_bench
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "neap/sim/loader.h"

namespace {

using at::Tensor;
constexpr int kRounds = 40;
constexpr int kCallsPerRound = 500;

struct Operator {
  std::string name;
  std::function<void(const std::vector<Tensor>&)> call;
  bool metadata_only = false;
};

double microseconds_per_call(const Operator& op, const std::vector<Tensor>& inputs) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCallsPerRound; ++i) op.call(inputs);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return took.count() / kCallsPerRound;
}

std::vector<Operator> operators() {
  return {
      {"empty", [](const auto& t) { at::empty({16}, t[0].options()); }},
      {"view",
       [](const auto& t) {
         t[0].view({4, 4});
       },
       /*metadata_only=*/true},
      {"add", [](const auto& t) { at::add(t[0], t[1]); }},
      {"add_out", [](const auto& t) { at::add_out(const_cast<Tensor&>(t[2]), t[0], t[1]); }},
      {"mul_", [](const auto& t) { Tensor(t[2]).mul_(t[1]); }},
      {"mm", [](const auto& t) { at::mm(t[3], t[3]); }},
      {"softmax", [](const auto& t) { at::softmax(t[3], -1); }},
      {"layer_norm", [](const auto& t) { at::native_layer_norm(t[3], {4}, {}, {}, 1e-5); }},
      {"cat",
       [](const auto& t) {
         at::cat({t[0], t[1]});
       }},
      {"embedding", [](const auto& t) { at::embedding(t[3], t[4]); }},
      {"copy", [](const auto& t) { Tensor(t[2]).copy_(t[0]); }},
  };
}

std::vector<Tensor> inputs_on(c10::Device device) {
  at::manual_seed(1);
  std::vector<Tensor> inputs{at::randn({16}), at::randn({16}), at::ones({16}), at::randn({4, 4}),
                             at::randint(0, 4, {4}, at::kLong)};
  for (auto& t : inputs) t = t.to(device);
  return inputs;
}

void print_figure(const char* name, double value) {
  std::printf("{\"name\": \"%s\", \"value\": %.3f, \"unit\": \"us\", \"goal\": 5, \"better\": \"lower\"}\n", name,
              value);
}

// The overheads in microseconds, sorted; views, which run no kernel, are printed and left out.
std::vector<double> measure(const char* title) {
  const auto on_cpu = inputs_on(at::kCPU), on_sim = inputs_on({c10::kPrivateUse1, 0});
  std::vector<double> overheads;
  std::printf("%s\n", title);
  for (const auto& op : operators()) {
    double cpu = std::numeric_limits<double>::infinity(), sim = cpu;
    for (int round = 0; round < kRounds; ++round) {
      cpu = std::min(cpu, microseconds_per_call(op, on_cpu));
      sim = std::min(sim, microseconds_per_call(op, on_sim));
    }
    std::printf("  %-12s cpu %6.2f us   sim %6.2f us   %+.2f\n", op.name.c_str(), cpu, sim, sim - cpu);
    if (!op.metadata_only) overheads.push_back(sim - cpu);
  }
  std::sort(overheads.begin(), overheads.end());
  return overheads;
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const c10::NoGradGuard no_grad;
  auto& control = neap::sim::load();
  const auto plain = measure("without the hazard checker");
  auto config = control.config();
  config.hazard_check = true;
  control.configure(config);
  const auto checked = measure("with the hazard checker");
  print_figure("sim_operator_overhead", plain[plain.size() / 2]);
  print_figure("sim_operator_overhead_largest", plain.back());
  print_figure("sim_operator_overhead_with_hazard_checker", checked[checked.size() / 2]);
}
