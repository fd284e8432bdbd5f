// Full gradients and pieces of them: averages, clipping, accumulation, mixed precision.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <optional>

#include "neap/shard/test_support.h"
#include "testing/matchers.h"

namespace neap::shard {
namespace {

using namespace testing;

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Gradients, NormAndClippingCountEveryGradientOnce) {
  const auto net = three_units();
  net->loss(0).backward();
  at::Tensor all = at::cat({net->unit(0).parameter(0).grad().view(-1), net->unit(1).parameter(0).grad().view(-1),
                            net->unit(2).parameter(0).grad().view(-1)});
  for (const int replicas : {1, 2}) {
    std::vector<std::shared_ptr<TestNet>> nets;
    for (int rank = 0; rank < 4; ++rank) nets.push_back(three_units());
    testing::run_ranks(4, [&](comm::World& world) {
      TestNet& mine = *nets[static_cast<std::size_t>(world.rank())];
      const comm::Mesh mesh(4, world.rank(), {.data_parallel_shard = -1, .data_parallel_replicate = replicas});
      Sharded sharded = fully_shard(mine, world.groups(mesh));
      sharded.run([&] { return mine.loss(0); }).backward();
      for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
        const double expected = at::linalg_vector_norm(all, p, {}, false, at::kDouble).item<double>();
        EXPECT_NEAR(sharded.grad_norm(p), expected, 1e-6 * expected) << p;
      }
      const double before = sharded.grad_norm();
      EXPECT_EQ(sharded.clip_grad_norm(before / 2), before);
      EXPECT_NEAR(sharded.grad_norm(), before / 2, 1e-4 * before);
    });
  }
}

TEST(Gradients, SumAndFactorReplaceTheAverage) {
  Options sum;
  sum.reduce_op = ReduceOp::kSum;
  sum.gradient_factor = 0.25;
  const auto net = three_units();
  net->loss(0).backward();
  on_ranks(2, sum, [&](comm::World&, TestNet& mine, Sharded& sharded) {
    sharded.run([&] { return mine.loss(0); }).backward();
    for (const Shard& shard : sharded.shards()) {
      const auto whole = net->unit(static_cast<std::size_t>(shard.name[7] - '0')).parameter(0).grad().view(-1);
      EXPECT_TRUE(bit_equal(mine.unit(static_cast<std::size_t>(shard.name[7] - '0')).parameter(0).grad(),
                            (whole + whole).slice(0, shard.begin, shard.end) * 0.25));
    }
  });
}

TEST(Gradients, OfMicroBatchesTogetherAreThoseOfOneBatch) {
  const auto whole = three_units();
  at::Tensor x = at::cat({TestNet::input(0), TestNet::input(1), TestNet::input(2), TestNet::input(3)});
  for (const std::size_t i : {0, 1, 2}) x = whole->unit(i).forward(x);
  x.pow(2).mean().backward();
  for (const bool kept_full : {true, false}) {
    Options options;
    options.gradient_factor = 0.5;  // two micro-batches a rank
    on_ranks(2, options, [&](comm::World& world, TestNet& net, Sharded& sharded) {
      {
        std::optional<Sharded::NoSync> no_sync;
        if (kept_full) no_sync.emplace(sharded);
        sharded.run([&] { return net.loss(world.rank()); }).backward();
        EXPECT_EQ(sharded.usage().gradients > Bytes(0), kept_full);
        EXPECT_EQ(net.unit(0).parameter(0).grad().defined(), !kept_full);
      }
      sharded.run([&] { return net.loss(2 + world.rank()); }).backward();
      for (const Shard& shard : sharded.shards()) {
        const auto i = static_cast<std::size_t>(shard.name[7] - '0');
        const at::Tensor expected = whole->unit(i).parameter(0).grad().view(-1).slice(0, shard.begin, shard.end);
        EXPECT_TRUE(at::allclose(net.unit(i).parameter(0).grad(), expected, 1e-5, 1e-8));
      }
    });
  }
}

TEST(Gradients, UnderCreateGraphAreCopiedIntoPlaceAndCounted) {
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    sharded.run([&] { return net.loss(0); }).backward();
    std::vector<at::Tensor> expected;
    for (const at::Tensor& p : net.parameters()) expected.push_back(std::exchange(p.mutable_grad(), at::Tensor()));
    sharded.run([&] { return net.loss(0); }).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    const auto parameters = net.parameters();
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(bit_equal(parameters[i].grad().detach(), expected[i]));
    EXPECT_EQ(sharded.usage().copied, Bytes(3 * kSide * kSide * 4));
  });
}

TEST(Gradients, AReplacedHookIsNoticedBeforeAGradientIsLost) {
  struct Nothing final : torch::autograd::PostAccumulateGradHook {
    void operator()(const at::Tensor& /*parameter*/) override {}
  };
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    torch::autograd::impl::set_post_acc_grad_hooks(net.unit(1).parameter(0), std::make_unique<Nothing>());
    EXPECT_THAT(message_of([&] { sharded.run([&] { return net.loss(0); }).backward(); }),
                AllOf(HasSubstr("'layers.1.p0'"), HasSubstr("was replaced")));
    expect_at_rest(sharded);
  });
}

TEST(MixedPrecision, ComputesInBfloat16OverFloat32Masters) {
  Options options;
  options.param_dtype = at::kBFloat16;
  options.reduce_dtype = at::kFloat;
  options.output_dtype = at::kDouble;
  on_ranks(2, options, [](comm::World&, TestNet& net, Sharded& sharded) {
    const at::Tensor handle = net.unit(0).parameter(0);
    const auto loss = [&](const at::Tensor& input) {
      return net.unit(2).forward(net.unit(1).forward(net.unit(0).forward(input))).pow(2).mean();
    };
    const at::Tensor x = TestNet::input(0).to(at::kBFloat16);
    // The reference: bfloat16 copies of the masters, gradients of both ranks' equal batches.
    std::vector<at::Tensor> copies;
    at::Tensor y = x;
    for (const uint64_t seed : {1, 2, 3}) {
      copies.push_back(parameter({kSide, kSide}, seed).detach().to(at::kBFloat16).set_requires_grad(true));
      y = at::linear(y, copies.back()).tanh();
    }
    y.pow(2).mean().backward();
    const at::Tensor result = sharded.run([&] { return loss(x); });
    EXPECT_EQ(result.scalar_type(), at::kDouble);
    result.backward();
    EXPECT_EQ(handle.scalar_type(), at::kFloat);
    EXPECT_EQ(handle.grad().scalar_type(), at::kFloat);
    for (const Shard& shard : sharded.shards()) {
      const auto i = static_cast<std::size_t>(shard.name[7] - '0');
      const at::Tensor whole = copies[i].grad().to(at::kFloat).view(-1);
      EXPECT_TRUE(bit_equal(net.unit(i).parameter(0).grad(), whole.slice(0, shard.begin, shard.end)));
    }
    // One cast pass over the shard per gather, and nothing for gradients.
    const Usage usage = sharded.usage();
    EXPECT_EQ(usage.copied, Bytes(usage.gathers * kSide * kSide / 2 * 4));
    const auto state = sharded.full_state();
    for (const auto& [name, value] : state) EXPECT_EQ(value.scalar_type(), at::kFloat);
    expect_at_rest(sharded);
  });
}

// Gradients of one pass stay in bfloat16 until ranks add them up, in float32; those of several add up in float32
// before.
TEST(MixedPrecision, AddsUpInFloat32OverPassesAndRanks) {
  Options options;
  options.param_dtype = at::kBFloat16;
  options.reduce_dtype = at::kFloat;
  on_ranks(2, options, [](comm::World& world, TestNet& net, Sharded& sharded) {
    const auto gradient_of = [](int64_t batch) {
      const at::Tensor w = parameter({kSide, kSide}, 1).detach().to(at::kBFloat16).set_requires_grad(true);
      at::linear(TestNet::input(batch).to(at::kBFloat16), w).tanh().pow(2).mean().backward();
      return w.grad().to(at::kFloat).view(-1);
    };
    const auto backward = [&](int64_t batch) {
      sharded.run([&] { return net.unit(0).forward(TestNet::input(batch).to(at::kBFloat16)).pow(2).mean(); })
          .backward();
    };
    const auto expect_gradient = [&](const at::Tensor& sum) {
      const Shard shard = sharded.shards().front();
      EXPECT_TRUE(bit_equal(net.unit(0).parameter(0).grad(), (sum / 2).slice(0, shard.begin, shard.end)));
      net.unit(0).parameter(0).mutable_grad().reset();
    };
    backward(world.rank());
    expect_gradient(gradient_of(0) + gradient_of(1));
    {
      const Sharded::NoSync no_sync(sharded);
      backward(world.rank());
      EXPECT_EQ(sharded.usage().gradients, Bytes(kSide * kSide * 4));
    }
    backward(world.rank() + 2);
    expect_gradient((gradient_of(0) + gradient_of(2)) + (gradient_of(1) + gradient_of(3)));
    backward(world.rank());
    expect_gradient(gradient_of(0) + gradient_of(1));
  });
}

TEST(Gradients, ThatAHookKeepsStayAsTheyWere) {
  for (const int ranks : {1, 2}) {
    Options options;
    options.gradient_factor = 0.5;
    on_ranks(ranks, options, [](comm::World&, TestNet& net, Sharded& sharded) {
      at::Tensor kept, values;
      const auto handle = net.unit(1).parameter(0).register_hook([&](const at::Tensor& grad) {
        kept = grad;
        values = grad.clone();
      });
      sharded.run([&] { return net.loss(0); }).backward();
      EXPECT_TRUE(bit_equal(kept, values));
      const Shard shard = sharded.shards()[1];
      const at::Tensor expected = values.mul(0.5).view(-1).slice(0, shard.begin, shard.end);
      EXPECT_TRUE(bit_equal(net.unit(1).parameter(0).grad().view(-1), expected));
      net.unit(1).parameter(0).remove_hook(handle);
    });
  }
}

}  // namespace
}  // namespace neap::shard
