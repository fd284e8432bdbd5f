// Nanoseconds per saved tensor, from libtorch alone to the whole engine, and the same as passes grow.
//
// The graph is a chain of sin() of 16 floats, each of which saves its input; the engine gets it in units of twelve. A
// cost is what a whole forward, backward and release takes beyond the same without hooks, per saved tensor. Cases take
// turns, the best of many rounds counts, and on the CPU, where backward runs on the calling thread, its processor time
// is what is measured: neighbours on the machine disturb little.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/figure.h"
#include "neap/autograd/hook_point.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/version_stamp.h"
#include "neap/offload/engine.h"
#include "neap/sim/loader.h"

namespace neap::bench {
namespace {

namespace ag = torch::autograd;

double thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}
double wall_ns() {
  return static_cast<double>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

// ---- the hook path

// Switches between libtorch's own engine and the proxy, so that both are measured in one process.
ag::Engine* g_engine = nullptr;
ag::Engine& chosen_engine() { return *g_engine; }
void use_engine(bool proxy) {
  static ag::Engine* const installed = [] {
    autograd::install_saved_tensor_hooks();
    return &ag::Engine::get_default_engine();
  }();
  g_engine = proxy ? installed : &ag::Engine::get_base_engine();
  ag::set_default_engine_stub(&chosen_engine);
}

// The least that is useful: keeps the data and stamps the version.
class KeepPolicy final : public autograd::SavedTensorPolicy {
 public:
  std::unique_ptr<ag::SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(); }

 private:
  struct Hook final : ag::SavedVariableHooks {
    void call_pack_hook(const at::Tensor& tensor) override {
      stamp = autograd::VersionStamp(tensor);
      held = tensor.variable_data();
    }
    at::Tensor call_unpack_hook() override {
      stamp.check(held.options(), held.sizes());
      return held;
    }
    at::Tensor held;
    autograd::VersionStamp stamp;
  };
};

// ---- a chain in units

class SinUnit : public torch::nn::Module, public autograd::Hookable {
 public:
  explicit SinUnit(int64_t operators) : operators_(operators) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] {
      at::Tensor y = x;
      for (int64_t i = 0; i < operators_; ++i) y = y.sin();
      return y;
    });
  }

 private:
  int64_t operators_;
};

class Chain : public torch::nn::Module {
 public:
  static constexpr int64_t kPerUnit = 12;

  Chain(int64_t tensors, c10::Device device)
      : leaf_(at::ones({16}, device).set_requires_grad(true)), grad_(at::ones({16}, device)) {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < tensors / kPerUnit; ++i) {
      units_.push_back(list->register_module(std::to_string(i), std::make_shared<SinUnit>(kPerUnit)));
    }
  }
  int64_t tensors() const { return static_cast<int64_t>(units_.size()) * kPerUnit; }

  void pass() {
    at::Tensor y = leaf_;
    for (const auto& unit : units_) y = unit->forward(y);
    y.backward(grad_);
  }

 private:
  std::vector<std::shared_ptr<SinUnit>> units_;
  at::Tensor leaf_, grad_;
};

// And comes back. With the usual windows a chain of so few bytes would be recalled while it is still on its way out, so
// they are as narrow against it as they are against a model: 16 tensors leave at a time, two units are fetched ahead.
offload::Options everything_leaves() {
  offload::Options options;
  options.min_bytes = Bytes(0);
  options.keep_last = 0;
  options.max_in_flight = Bytes(1024);
  options.prefetch = offload::Layers{2};
  return options;
}

// The engine's hooks alone: each tensor is too small to be considered.
offload::Options everything_kept() {
  offload::Options options = everything_leaves();
  options.min_bytes = Bytes(int64_t{1} << 30);
  return options;
}

// The engine's books without a copy.
offload::Options everything_stays() {
  offload::Options options = everything_leaves();
  options.device_budget = Bytes(int64_t{1} << 40);
  return options;
}

// ---- cases that take turns

struct Case {
  std::function<void()> run;
  double best = std::numeric_limits<double>::infinity();
};

void take_turns(std::vector<Case>& cases, int rounds, double (*clock)()) {
  for (Case& c : cases) c.run();
  for (int round = 0; round < rounds; ++round) {
    for (Case& c : cases) {
      const double begin = clock();
      c.run();
      c.best = std::min(c.best, clock() - begin);
    }
  }
}

// One SavedVariable made and destroyed.
void measure_one_tensor() {
  constexpr int kTensors = 10'000;
  const at::Tensor leaf = at::ones({16}).set_requires_grad(true);
  KeepPolicy keep;
  const auto save = [&leaf] {
    for (int i = 0; i < kTensors; ++i) const ag::SavedVariable saved(leaf, /*is_output=*/false);
  };
  std::vector<Case> cases{{[&] {
                            use_engine(/*proxy=*/false);
                            save();
                          }},
                          {[&] {
                            use_engine(/*proxy=*/true);
                            save();
                          }},
                          {[&] {
                            use_engine(/*proxy=*/true);
                            const autograd::SavedTensorScope scope(&keep);
                            save();
                          }}};
  take_turns(cases, 200, thread_ns);
  use_engine(/*proxy=*/true);
  const auto ns = [&](size_t i) { return cases[i].best / kTensors; };
  print_figure("saved_tensor_stock", ns(0), "ns");
  print_figure("saved_tensor_inactive_beyond_stock", std::max(0.0, ns(1) - ns(0)), "ns", 20);
  print_figure("saved_tensor_kept_by_scope_beyond_stock", ns(2) - ns(0), "ns");
}

// A whole pass over the chain: bare, below a scope that keeps, with an engine that keeps, with its books alone, with
// all of it leaving.
struct PassCosts {
  double scope, hooks, books, engine;  // ns per saved tensor beyond the bare chain
};

PassCosts measure_passes(int64_t tensors, c10::Device device, int rounds, double (*clock)()) {
  Chain bare(tensors, device), scoped(tensors, device), kept(tensors, device), booked(tensors, device),
      moved(tensors, device);
  offload::Engine hooks(everything_kept()), books(everything_stays()), engine(everything_leaves());
  hooks.attach(kept);
  books.attach(booked);
  engine.attach(moved);
  KeepPolicy keep;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto settled = [&](const auto& body) {
    return [&guard, device, body] {
      body();
      if (!device.is_cpu()) guard.synchronizeDevice(device.index());
    };
  };
  std::vector<Case> cases{{settled([&] { bare.pass(); })},
                          {settled([&] {
                            const autograd::SavedTensorScope scope(&keep);
                            scoped.pass();
                          })},
                          {settled([&] { kept.pass(); })},
                          {settled([&] { booked.pass(); })},
                          {settled([&] { moved.pass(); })}};
  take_turns(cases, rounds, clock);
  const auto report = engine.take_step_report();
  const int64_t expected = (rounds + 1) * bare.tensors();
  if (report.offloaded_storages < expected - (rounds + 1) || 10 * report.reloaded_storages < 9 * expected) {
    throw std::runtime_error("the engine offloaded " + std::to_string(report.offloaded_storages) + " and reloaded " +
                             std::to_string(report.reloaded_storages) + " storages of " + std::to_string(expected));
  }
  const auto beyond = [&](size_t i) { return (cases[i].best - cases[0].best) / static_cast<double>(bare.tensors()); };
  return {beyond(1), beyond(2), beyond(3), beyond(4)};
}

}  // namespace

int saved_tensor_cost(int /*argc*/, char** /*argv*/) {
  at::set_num_threads(1);
  sim::load();  // before the first backward: that is when autograd makes its threads, one for each device
  measure_one_tensor();
  const PassCosts cpu = measure_passes(240, at::kCPU, 400, thread_ns);
  if (cpu.scope <= 0) throw std::runtime_error("the machine is too busy to measure nanoseconds");
  print_figure("saved_tensor_in_graph_scope", cpu.scope, "ns");
  print_figure("saved_tensor_in_graph_engine_hooks", cpu.hooks, "ns");
  print_figure("saved_tensor_in_graph_engine_books", cpu.books, "ns");
  print_figure("saved_tensor_in_graph_engine_copies", cpu.engine, "ns");
  const PassCosts sim = measure_passes(240, {c10::DeviceType::PrivateUse1, 0}, 60, wall_ns);
  print_figure("saved_tensor_on_sim_engine", sim.engine, "ns");
  return 0;
}

int tape_length(int /*argc*/, char** /*argv*/) {
  at::set_num_threads(1);
  struct Length {
    const char* name;
    int64_t tensors;
    int rounds;
  };
  constexpr std::array kLengths{Length{"1e3", 1'000, 60}, Length{"1e4", 10'000, 8}, Length{"1e5", 100'000, 3}};
  std::vector<PassCosts> costs;
  for (const Length& length : kLengths) {
    costs.push_back(measure_passes(length.tensors, at::kCPU, length.rounds, thread_ns));
    print_figure(std::string("tape_cost_per_tensor_") + length.name, costs.back().engine, "ns");
    print_figure(std::string("tape_cost_of_the_least_hook_") + length.name, costs.back().scope, "ns");
  }
  // With 10^5 nodes a graph does not fit into any cache and the general allocator has long bins, so that also the least
  // hook grows dearer. What the tape adds to that is its own.
  const double hook = costs.back().scope / costs.front().scope;
  const double engine = costs.back().engine / costs.front().engine;
  print_figure("tape_cost_growth_1e3_to_1e5", engine, "x");
  print_figure("tape_cost_growth_of_the_least_hook", hook, "x");
  print_figure("tape_cost_growth_beyond_the_least_hook", engine / hook, "x", 1.2);
  return 0;
}

}  // namespace neap::bench
