// Composer pull request 3030: running out of memory in backward left FSDP's flat parameters unsharded, so that the
// retry with smaller micro-batches began with less memory than the attempt that had failed.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/shard/fully_shard.h"
#include "testing/matchers.h"
#include "testing/ranks.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

constexpr int kShards = 2;
constexpr int64_t kWidth = 256, kUnits = 4;

class DenseUnit : public torch::nn::Module, public autograd::Hookable {
 public:
  DenseUnit(int64_t index, c10::Device device)
      : weight_(register_parameter("weight", at::full({kWidth, kWidth}, 0.01 / static_cast<double>(index + 1),
                                                      at::TensorOptions().device(device)))) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] { return at::linear(x, weight_).tanh(); });
  }

 private:
  at::Tensor weight_;
};

class DenseNet : public torch::nn::Module {
 public:
  explicit DenseNet(c10::Device device) : device_(device) {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < kUnits; ++i) {
      units_.push_back(list->register_module(std::to_string(i), std::make_shared<DenseUnit>(i, device)));
    }
  }
  at::Tensor loss() {
    at::Tensor x = at::ones({4, kWidth}, at::TensorOptions().device(device_));
    for (const auto& unit : units_) x = unit->forward(x);
    return x.pow(2).sum();
  }

 private:
  c10::Device device_;
  std::vector<std::shared_ptr<DenseUnit>> units_;
};

class Composer3030 : public SimTest {
 protected:
  // Of every device, while no rank has work queued.
  static void set_capacity(comm::World& world, Bytes capacity) {
    synchronize();
    world.all().barrier("before").synchronize();
    if (world.rank() == 0) configure([&](sim::DeviceConfig& config) { config.capacity = capacity; });
    world.all().barrier("after").synchronize();
  }
};

TEST_F(Composer3030, ARetryAfterRunningOutOfMemoryHasAllOfItAgain) {
  std::vector<std::shared_ptr<DenseNet>> nets;
  for (int rank = 0; rank < kShards; ++rank) nets.push_back(std::make_shared<DenseNet>(sim(rank)));
  const Bytes plenty = control().config().capacity;
  run_ranks(kShards, [&](comm::World& world) {
    DenseNet& net = *nets[static_cast<size_t>(world.rank())];
    shard::Sharded sharded = shard::fully_shard(net, world.groups(comm::Mesh(kShards, world.rank())));
    const auto take_gradients = [&] {
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& p : net.parameters()) {
        gradients.push_back(p.grad().cpu());
        p.mutable_grad().reset();
      }
      return gradients;
    };
    sharded.run([&] { return net.loss(); }).backward();
    const std::vector<at::Tensor> expected = take_gradients();
    const int64_t at_rest = live_bytes(world.rank());

    at::Tensor loss = sharded.run([&] { return net.loss(); });
    // Room for a little of backward, but not for a unit's full gradient.
    set_capacity(world, Bytes(control().memory(world.rank()).current + kWidth * kWidth * 2));
    EXPECT_THROW(loss.backward(), c10::OutOfMemoryError);
    loss.reset();
    const shard::Usage usage = sharded.usage();
    EXPECT_EQ(usage.unsharded, Bytes(0));
    EXPECT_EQ(usage.gradients, Bytes(0));
    EXPECT_EQ(usage.live_units, 0);
    set_capacity(world, plenty);

    sharded.run([&] { return net.loss(); }).backward();
    EXPECT_TRUE(bit_equal(take_gradients(), expected));
    EXPECT_EQ(live_bytes(world.rank()), at_rest);
  });
}

}  // namespace
}  // namespace neap::testing
