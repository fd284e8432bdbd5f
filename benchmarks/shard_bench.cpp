// What sharding costs.
//
//   shard_bench engine    host time per unit and step at 10, 100 and 1000 units, on one rank: everything but the
//                         collectives, beyond the same model without sharding
//   torchrun --standalone --nproc-per-node 2 --no-python shard_bench step [bfloat16]
//                         milliseconds per step and live bytes of a Llama of 34 million parameters over Gloo
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "benchmarks/figure.h"
#include "neap/autograd/hook_point.h"
#include "neap/models/causal_lm.h"
#include "neap/shard/fully_shard.h"

namespace neap::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Counts the bytes of live CPU tensors: resident memory would count what the C library keeps, too.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& get() {
    static auto* const allocator = new CountingAllocator();
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* block = std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader);
    if (block == nullptr) throw std::bad_alloc();
    std::memcpy(block, &bytes, sizeof bytes);
    const int64_t now = live_ += static_cast<int64_t>(bytes);
    for (int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    void* data = static_cast<char*>(block) + kHeader;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  void reset_peak() { peak_ = live_.load(); }
  int64_t peak() const { return peak_; }

 private:
  static constexpr std::size_t kHeader = 64;

  static void release(void* data) {
    if (data == nullptr) return;
    void* block = static_cast<char*>(data) - kHeader;
    std::size_t bytes;
    std::memcpy(&bytes, block, sizeof bytes);
    get().live_ -= static_cast<int64_t>(bytes);
    std::free(block);
  }

  std::atomic<int64_t> live_{0}, peak_{0};
};

// ---- engine

class Scale : public torch::nn::Module, public autograd::Hookable {
 public:
  Scale() : weight_(register_parameter("weight", at::ones({8}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] { return x * weight_; });
  }

 private:
  at::Tensor weight_;
};

class Chain : public torch::nn::Module {
 public:
  explicit Chain(int64_t units) {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < units; ++i) {
      units_.push_back(list->register_module(std::to_string(i), std::make_shared<Scale>()));
    }
  }
  at::Tensor forward() {
    at::Tensor x = at::ones({8});
    for (const auto& unit : units_) x = unit->forward(x);
    return x.sum();
  }

 private:
  std::vector<std::shared_ptr<Scale>> units_;
};

double seconds_per_step(Chain& chain, shard::Sharded* sharded) {
  std::vector<double> times;
  for (int step = 0; step < 25; ++step) {
    const auto begin = Clock::now();
    (sharded != nullptr ? sharded->run([&] { return chain.forward(); }) : chain.forward()).backward();
    times.push_back(seconds_since(begin));
    for (const at::Tensor& p : chain.parameters()) p.mutable_grad().reset();
  }
  return median(times);
}

int engine() {
  const auto world = comm::World::connect(comm::Launch{});
  for (const int64_t units : {10, 100, 1000}) {
    Chain chain(units);
    const double plain = seconds_per_step(chain, nullptr);
    shard::Sharded sharded = shard::fully_shard(chain, world->groups(comm::Mesh(1, 0)));
    const double added = seconds_per_step(chain, &sharded) - plain;
    print_figure("shard_engine_us_per_unit_" + std::to_string(units), added * 1e6 / static_cast<double>(units), "µs");
  }
  world->close();
  return 0;
}

// ---- step

// As torch.optim.AdamW(fused=True) with its defaults.
class AdamW {
 public:
  explicit AdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& p : parameters_) {
      means_.push_back(at::zeros_like(p.detach()));
      squares_.push_back(at::zeros_like(p.detach()));
      steps_.push_back(at::zeros({}, at::kFloat));
    }
  }
  void step() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
    for (const at::Tensor& count : steps_) count.add_(1);
    at::_fused_adamw_(parameters_, gradients, means_, squares_, {}, steps_, /*lr=*/1e-3, 0.9, 0.999,
                      /*weight_decay=*/0.01, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
  }
  void zero_grad() {
    for (const at::Tensor& p : parameters_) p.mutable_grad().reset();
  }

 private:
  std::vector<at::Tensor> parameters_, means_, squares_, steps_;
};

int step(bool narrow) {
  constexpr int64_t kSequence = 256, kVocabulary = 8192;
  constexpr int kWarmUp = 3, kSteps = 12;
  c10::SetCPUAllocator(&CountingAllocator::get(), /*priority=*/100);
  at::set_num_threads(1);
  const auto world = comm::World::connect(comm::Launch::from_environment());
  models::LlamaConfig config;
  config.model_type = "llama";
  config.vocab_size = kVocabulary;
  config.hidden_size = 512;
  config.intermediate_size = 1408;
  config.num_hidden_layers = 8;
  config.num_attention_heads = config.num_key_value_heads = 8;
  config.head_dim = 64;
  const auto model = models::make_llama(config);
  shard::Options options;
  if (narrow) {
    options.param_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
  }
  shard::Sharded sharded = shard::fully_shard(*model, world->groups(comm::Mesh(world->size(), world->rank())), options);
  AdamW optimizer(sharded.parameters());
  std::vector<double> times;
  double loss_value = 0;
  for (int64_t i = 0; i < kWarmUp + kSteps; ++i) {
    const auto ids = (at::arange(kSequence + 1, at::kLong) * 31 + i * 7 + world->rank() * 101).remainder(kVocabulary);
    const auto batch = ids.view({1, -1});
    world->all().barrier("step").wait();
    if (i == kWarmUp) CountingAllocator::get().reset_peak();
    const auto begin = Clock::now();
    const at::Tensor loss =
        sharded.run([&] { return model->loss(batch.narrow(1, 0, kSequence), batch.narrow(1, 1, kSequence)); });
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (i >= kWarmUp) times.push_back(seconds_since(begin));
    loss_value = loss.item<double>();
  }
  if (world->rank() == 0) {
    const std::string name =
        std::string("shard_step_") + (narrow ? "bfloat16_" : "float32_") + std::to_string(world->size()) + "_ranks";
    print_figure(name + "_ms", median(times) * 1e3, "ms");
    print_figure(name + "_fastest_ms", *std::ranges::min_element(times) * 1e3, "ms");
    print_figure(name + "_live", static_cast<double>(CountingAllocator::get().peak()) / (1 << 20), "MiB");
    print_figure(name + "_loss", loss_value, "");
  }
  world->close();
  return 0;
}

}  // namespace
}  // namespace neap::bench

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "engine") return neap::bench::engine();
  if (what == "step") return neap::bench::step(argc > 2 && std::string_view(argv[2]) == "bfloat16");
  std::fprintf(stderr, "expected: shard_bench engine | step [bfloat16]\n");
  return 2;
}
