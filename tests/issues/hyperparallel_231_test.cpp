// HyperParallel issue 231: fully_shard with comm_fusion held the fused buffer and, beside it, every local shard. Here
// the flat shard is the only storage behind the local shards: two of 4 MiB make one buffer of 8 MiB a rank.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/shard/fully_shard.h"
#include "testing/matchers.h"
#include "testing/ranks.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kRows = 2048, kColumns = 1024;  // 8 MiB of float32: 4 MiB a rank

class Block : public torch::nn::Module, public autograd::Hookable {
 public:
  explicit Block(at::TensorOptions options)
      : up_(register_parameter("up", at::ones({kRows, kColumns}, options) * 0.001)),
        down_(register_parameter("down", at::ones({kRows, kColumns}, options) * 0.002)) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] { return at::matmul(at::linear(x, up_), down_); });
  }

 private:
  at::Tensor up_, down_;
};

class Model : public torch::nn::Module {
 public:
  Model(int64_t blocks, at::TensorOptions options) {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < blocks; ++i) {
      blocks_.push_back(list->register_module(std::to_string(i), std::make_shared<Block>(options)));
    }
  }
  at::Tensor loss(c10::Device device) {
    at::Tensor x = at::ones({1, kColumns}, at::TensorOptions().device(device));
    for (const auto& block : blocks_) x = block->forward(x) * 0.1;
    return x.pow(2).mean();
  }

 private:
  std::vector<std::shared_ptr<Block>> blocks_;
};

class HyperParallel231 : public SimTest {
 protected:
  // One model per rank on the rank's device, made before the ranks start.
  static std::vector<std::shared_ptr<Model>> models(int64_t blocks, at::TensorOptions options = {}) {
    std::vector<std::shared_ptr<Model>> models;
    for (int rank = 0; rank < kRanks; ++rank) {
      models.push_back(std::make_shared<Model>(blocks, options.has_device() ? options : options.device(sim(rank))));
    }
    return models;
  }
  static comm::MeshGroups groups_of(comm::World& world) { return world.groups(comm::Mesh(world.size(), world.rank())); }
  static void expect_one_buffer(const std::vector<at::Tensor>& parameters) {
    ASSERT_EQ(parameters.size(), 2);
    const c10::Storage& storage = parameters[0].storage();
    EXPECT_EQ(storage.nbytes(), 8 * kMiB);
    int64_t bytes = 0;
    for (const at::Tensor& p : parameters) {
      EXPECT_TRUE(p.storage().is_alias_of(storage));
      bytes += static_cast<int64_t>(p.nbytes());
    }
    EXPECT_EQ(bytes, 8 * kMiB);
  }
};

TEST_F(HyperParallel231, TwoShardsOfFourMebibytesAreOneBufferOfEight) {
  auto all = models(1);
  run_ranks(kRanks, [&](comm::World& world) {
    Model& model = *all[static_cast<size_t>(world.rank())];
    const std::vector<at::Tensor> handles = model.parameters();
    EXPECT_EQ(live_bytes(world.rank()), 16 * kMiB);
    shard::Sharded sharded = shard::fully_shard(model, groups_of(world));
    EXPECT_EQ(live_bytes(world.rank()), 8 * kMiB);
    expect_one_buffer(handles);
    EXPECT_EQ(sharded.usage().shards, Bytes(8 * kMiB));
    EXPECT_EQ(sharded.usage().minimum, Bytes(8 * kMiB));
    EXPECT_EQ(sharded.usage().padding, Bytes(0));
  });
}

TEST_F(HyperParallel231, ModuleOptimizerAndHandlesSeeTheSameObjectsAfterStepLoadAndSecondBuild) {
  auto all = models(1);
  run_ranks(kRanks, [&](comm::World& world) {
    Model& model = *all[static_cast<size_t>(world.rank())];
    const c10::Device device = sim(world.rank());
    const std::vector<at::Tensor> handles = model.parameters();
    for (int build = 0; build < 2; ++build) {
      shard::Sharded sharded = shard::fully_shard(model, groups_of(world));
      {
        torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-3));
        sharded.run([&] { return model.loss(device); }).backward();
        optimizer.step();
        optimizer.zero_grad();
        const auto& group = optimizer.param_groups()[0].params();
        for (size_t i = 0; i < handles.size(); ++i) {
          EXPECT_EQ(group[i].unsafeGetTensorImpl(), handles[i].unsafeGetTensorImpl());
          EXPECT_EQ(model.parameters()[i].unsafeGetTensorImpl(), handles[i].unsafeGetTensorImpl());
        }
        expect_one_buffer(handles);
      }
      EXPECT_EQ(live_bytes(world.rank()), 8 * kMiB);
      auto state = sharded.full_state();
      if (world.rank() != 0) {  // every rank loads the same
        state = {{"layers.0.up", at::zeros({kRows, kColumns})}, {"layers.0.down", at::ones({kRows, kColumns})}};
      } else {
        state["layers.0.up"].zero_();
        state["layers.0.down"].fill_(1);
      }
      sharded.load_full_state(state);
      expect_one_buffer(handles);
      EXPECT_EQ(live_bytes(world.rank()), 8 * kMiB);
      sharded.dissolve();
      EXPECT_EQ(live_bytes(world.rank()), 16 * kMiB);
    }
  });
}

TEST_F(HyperParallel231, AfterMetaInitialisationTheShardIsAllThereIs) {
  auto all = models(1, at::TensorOptions().device(at::kMeta));
  run_ranks(kRanks, [&](comm::World& world) {
    Model& model = *all[static_cast<size_t>(world.rank())];
    const std::vector<at::Tensor> handles = model.parameters();
    shard::Options options;
    options.device = sim(world.rank());
    options.initialize = [](const std::string&, const at::Tensor& full) { full.fill_(0.5); };
    shard::Sharded sharded = shard::fully_shard(model, groups_of(world), options);
    EXPECT_EQ(live_bytes(world.rank()), 8 * kMiB);
    expect_one_buffer(handles);
    EXPECT_EQ(model.parameters()[0].unsafeGetTensorImpl(), handles[0].unsafeGetTensorImpl());
    sharded.run([&] { return model.loss(sim(world.rank())); }).backward();
    for (const at::Tensor& p : handles) p.mutable_grad().reset();
    EXPECT_EQ(live_bytes(world.rank()), 8 * kMiB);
  });
}

TEST_F(HyperParallel231, BuildingNeedsOneGroupBesideTheModelAndAStepTwoUnits) {
  constexpr int64_t kBlocks = 4;
  auto all = models(kBlocks);
  run_ranks(kRanks, [&](comm::World& world) {
    Model& model = *all[static_cast<size_t>(world.rank())];
    control().reset_peak(world.rank());
    shard::Sharded sharded = shard::fully_shard(model, groups_of(world));
    EXPECT_EQ(control().memory(world.rank()).requested_peak, kBlocks * 16 * kMiB + 8 * kMiB);
    EXPECT_EQ(live_bytes(world.rank()), kBlocks * 8 * kMiB);
    for (int step = 0; step < 2; ++step) {
      control().reset_peak(world.rank());
      sharded.run([&] { return model.loss(sim(world.rank())); }).backward();
      for (const at::Tensor& p : model.parameters()) p.mutable_grad().reset();
      // Shards and their gradients, two unsharded units, one unit's full gradient and one that is being reduced.
      const int64_t most = 2 * kBlocks * 8 * kMiB + 2 * 16 * kMiB + 2 * 16 * kMiB;
      EXPECT_LE(control().memory(world.rank()).requested_peak, most + 32 * kMiB);  // operators' own gradients
    }
    EXPECT_EQ(sharded.usage().live_units_peak, 2);
    EXPECT_EQ(sharded.usage().copied, Bytes(0));
    EXPECT_EQ(live_bytes(world.rank()), kBlocks * 8 * kMiB);
  });
}

}  // namespace
}  // namespace neap::testing
