// A model of one's own with offload, recomputation and pieces over the ranks, all through the public headers.
#include <ATen/Functions.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <iostream>

#include "neap/autograd/hook_point.h"
#include "neap/comm/launch.h"
#include "neap/comm/world.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "neap/shard/fully_shard.h"

constexpr int64_t kVocabulary = 64, kWidth = 128, kBlocks = 4, kSequence = 64;

// A unit: it runs through its hook point, and names a body that can run again.
class Block : public torch::nn::Module, public neap::autograd::Hookable {
 public:
  Block() {
    up_ = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down_ = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return hook_point().run(*this, {x}, &Block::body); }

 private:
  at::Tensor body(const at::Tensor& x) { return x + down_(at::gelu(up_(x))); }
  torch::nn::Linear up_{nullptr}, down_{nullptr};
};

class Model : public torch::nn::Module {
 public:
  Model() {
    embed_ = register_module("embed", torch::nn::Embedding(kVocabulary, kWidth));
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < kBlocks; ++i) blocks_->push_back(std::make_shared<Block>());
    head_ = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }
  // tokens: [rows, kSequence + 1] int64. The mean loss of each next token.
  at::Tensor loss(const at::Tensor& tokens) {
    at::Tensor x = embed_(tokens.narrow(1, 0, kSequence));
    for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
    return at::cross_entropy_loss(head_(x).flatten(0, 1), tokens.narrow(1, 1, kSequence).flatten());
  }

 private:
  torch::nn::Embedding embed_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::Linear head_{nullptr};
};

int main() {
  const auto world = neap::comm::World::connect(neap::comm::Launch::from_environment());
  at::manual_seed(0);  // all ranks begin with the same weights
  Model model;
  neap::shard::Sharded sharded = neap::shard::fully_shard(model, world->groups({world->size(), world->rank()}));
  neap::offload::Engine offload({.min_bytes = neap::Bytes(0)});
  offload.attach(model, {"blocks.{*}"});
  neap::recompute::Recompute recompute;
  recompute.attach(model, {"blocks.0", "blocks.1"});  // of these two only the inputs are left to move
  torch::optim::AdamW optimizer(sharded.parameters(), 3e-3);

  for (int64_t step = 1; step <= 20; ++step) {
    const at::Tensor starts = at::randint(kVocabulary, {4, 1}, at::kLong) + world->rank();
    const at::Tensor tokens = (starts + at::arange(kSequence + 1) * 5).remainder(kVocabulary);
    const at::Tensor loss = sharded.run([&] { return model.loss(tokens); });
    loss.backward();
    sharded.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (world->rank() != 0 || step % 10 != 0) continue;
    std::cout << "step " << step << "  loss " << loss.item<float>() << "  offloaded "
              << offload.take_step_report().offloaded_bytes << "  ran again " << recompute.take_step_report().reruns
              << "  parameters here " << sharded.usage().shards << '\n';
  }
  world->close();
}
