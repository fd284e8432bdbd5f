// The C++ side of fsdp2_step.py: trains a Hugging Face directory in pieces, a step whenever it is told to.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/counting_allocator.h"
#include "benchmarks/figure.h"
#include "neap/models/hugging_face.h"
#include "neap/shard/fully_shard.h"

namespace neap::bench {
namespace {

constexpr int64_t kSequence = 256;

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

class Training {
 public:
  Training(comm::World& world, const char* model_dir, bool narrow)
      : world_(world), model_(models::model_from_hf(model_dir)) {
    if (world.size() > 1) {
      shard::Options options;
      if (narrow) {
        options.param_dtype = at::kBFloat16;
        options.reduce_dtype = at::kFloat;
      }
      sharded_.emplace(shard::fully_shard(*model_, world.groups(comm::Mesh(world.size(), world.rank())), options));
    }
    optimizer_.emplace(sharded_ ? sharded_->parameters() : model_->parameters());
  }

  double step(int64_t number) {
    const int64_t vocabulary = model_->config().vocab_size;
    const at::Tensor batch = (at::arange(kSequence + 1, at::kLong) * 31 + number * 7 + world_.rank() * 101)
                                 .remainder(vocabulary)
                                 .view({1, -1});
    const auto forward = [&] { return model_->loss(batch.narrow(1, 0, kSequence), batch.narrow(1, 1, kSequence)); };
    const at::Tensor loss = sharded_ ? sharded_->run(forward) : forward();
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.item<double>();
  }

 private:
  comm::World& world_;
  std::shared_ptr<models::CausalLM> model_;
  std::optional<shard::Sharded> sharded_;
  std::optional<AdamW> optimizer_;
};

// Rank 0 reads a line for each step; the others learn of it from rank 0. False: there are no more.
bool next_turn(comm::World& world) {
  const at::Tensor go = at::zeros({1}, at::kInt);
  std::string line;
  if (world.rank() == 0 && std::getline(std::cin, line)) go.fill_(1);
  world.all().broadcast(go, 0, "next turn").wait();
  return go.item<int>() != 0;
}

}  // namespace

int shard_step(int argc, char** argv) {
  const std::string_view dtype = argc == 4 ? argv[3] : "";
  if (dtype != "float32" && dtype != "bfloat16") {
    std::fprintf(stderr, "expected: shard_bench step MODEL_DIR float32|bfloat16\n");
    return 2;
  }
  neap_count_cpu_tensors();
  at::set_num_threads(1);
  const auto world = comm::World::connect(comm::Launch::from_environment());
  Training training(*world, argv[2], dtype == "bfloat16");
  if (world->rank() == 0) std::cout << "ready" << std::endl;
  for (int64_t number = 0; next_turn(*world); ++number) {
    neap_reset_peak_bytes();
    const auto begin = std::chrono::steady_clock::now();
    const double loss = training.step(number);
    world->all().barrier("the step's end").wait();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    if (world->rank() != 0) continue;
    std::printf(R"({"ms": %.3f, "loss": %.9g, "rest": %lld, "peak": %lld})"
                "\n",
                time.count(), loss, static_cast<long long>(neap_live_bytes()),
                static_cast<long long>(neap_peak_bytes() + neap_reduction_scratch(world->size())));
    std::fflush(stdout);
  }
  world->close();
  return 0;
}

}  // namespace neap::bench
