// Whole training steps on sim: equal to the CPU's to the last bit, and without a trace when they are over.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <torch/optim/adamw.h>

#include <mutex>
#include <string>
#include <thread>

#include "testing/matchers.h"
#include "testing/sim_fixture.h"
#include "testing/tiny_llama.h"

namespace neap::testing {
namespace {

using at::Tensor;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

std::string thread_name() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

class Training : public SimTest, public ::testing::WithParamInterface<bool> {};

TEST_P(Training, FiveStepsOfLlamaEqualTheCpuToTheLastBit) {
  const TinyLlamaConfig config{.fused_attention = GetParam()};
  TinyLlama on_cpu(config, at::kCPU), on_device(config, sim());
  AdamW cpu_optimizer(on_cpu.parameters(), AdamWOptions(1e-3)), optimizer(on_device.parameters(), AdamWOptions(1e-3));
  for (uint64_t step = 0; step < 5; ++step) {
    cpu_optimizer.zero_grad();
    optimizer.zero_grad();
    const auto expected = on_cpu.loss(on_cpu.tokens(step)), loss = on_device.loss(on_device.tokens(step));
    ASSERT_TRUE(bit_equal(loss, expected)) << "step " << step;
    expected.backward();
    loss.backward();
    ASSERT_TRUE(bit_equal(gradients(on_device.parameters()), gradients(on_cpu.parameters()))) << "step " << step;
    cpu_optimizer.step();
    optimizer.step();
    ASSERT_TRUE(bit_equal(on_device.parameters(), on_cpu.parameters())) << "step " << step;
  }
  EXPECT_GT(control().counters(0).kernels, 1000);
}

INSTANTIATE_TEST_SUITE_P(Attention, Training, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Fused" : "Composed"; });

class Backward : public SimTest {};

TEST_F(Backward, ReturnsEveryByteOfTheStep) {
  TinyLlama model({}, sim());
  const auto before = live_bytes();
  const auto tokens = model.tokens(0);
  model.loss(tokens).backward();
  EXPECT_GT(control().memory(0).requested_peak, 2 * before);
  for (auto& p : model.parameters()) p.mutable_grad().reset();
  EXPECT_EQ(live_bytes(), before + static_cast<int64_t>(tokens.nbytes()));
}

TEST_F(Backward, RunsOnTheDevicesThreadAndOnTheStreamOfTheForward) {
  const c10::impl::VirtualGuardImpl guard(kSim);
  TinyLlama model({}, sim());
  const auto side = guard.getStreamFromGlobalPool(sim());
  for (const auto want : {guard.getDefaultStream(sim()), side}) {
    std::string thread;
    std::vector<c10::Stream> streams;
    Tensor loss;
    {
      c10::Event start(kSim), end(kSim);
      start.record(guard.getDefaultStream(sim()));
      const c10::StreamGuard on(want);
      start.block(want);
      loss = model.loss(model.tokens(0), [&](const Tensor& hidden) {
        hidden.register_hook([&](const Tensor& gradient) {
          thread = thread_name();
          streams.push_back(guard.getStream(sim()));
          return gradient;
        });
      });
      end.record(want);
      end.block(guard.getDefaultStream(sim()));
    }
    for (auto& p : model.parameters()) p.mutable_grad().reset();
    loss.backward();
    EXPECT_EQ(thread, "pt_autograd_0");
    ASSERT_FALSE(streams.empty());
    for (const auto& stream : streams) EXPECT_EQ(stream, want);
    // The gradients are usable from the caller's stream at once.
    EXPECT_TRUE(std::isfinite(model.parameters()[3].grad().sum().item<float>()));
  }
}

TEST_F(Backward, OfAPipelineOverTwoDevicesRunsOnTheirTwoThreads) {
  const auto weights = at::randn({2, 64, 64}), input = at::randn({8, 64});
  const auto run = [&](c10::Device first, c10::Device second, std::vector<std::string>* threads) {
    const auto w1 = weights[0].to(first, at::kFloat, false, /*copy=*/true).set_requires_grad(true);
    const auto w2 = weights[1].to(second, at::kFloat, false, /*copy=*/true).set_requires_grad(true);
    const auto hidden = at::gelu(at::linear(input.to(first), w1));
    const auto output = at::linear(hidden.to(second), w2);
    if (threads) {
      for (const auto& t : {hidden, output}) {
        t.register_hook([threads](const Tensor& gradient) {
          threads->push_back(thread_name());
          return gradient;
        });
      }
    }
    output.pow(2).mean().backward();
    return std::vector<Tensor>{w1.grad(), w2.grad()};
  };
  std::vector<std::string> threads;
  EXPECT_TRUE(bit_equal(run(sim(0), sim(1), &threads), run(at::kCPU, at::kCPU, nullptr)));
  EXPECT_EQ(threads, (std::vector<std::string>{"pt_autograd_1", "pt_autograd_0"}));
  EXPECT_GT(control().counters(0).peer.copies + control().counters(1).peer.copies, 1);
}

TEST_F(Backward, OfTwoRanksAsThreadsDoNotMeet) {
  const TinyLlamaConfig config{.fused_attention = true};
  const auto train = [&](c10::Device device) {
    TinyLlama model(config, device);
    AdamW optimizer(model.parameters(), AdamWOptions(1e-3));
    for (uint64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model.loss(model.tokens(step)).backward();
      optimizer.step();
    }
    std::vector<Tensor> result;
    for (const auto& p : model.parameters()) result.push_back(p.detach().cpu());
    return result;
  };
  const auto expected = train(at::kCPU);
  std::vector<Tensor> results[2];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const c10::DeviceGuard guard(sim(rank));
      results[rank] = train(sim(rank));
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_TRUE(bit_equal(results[0], expected));
  EXPECT_TRUE(bit_equal(results[1], expected));
}

TEST_F(Backward, ThatThrowsLeavesNothingBehind) {
  const auto x = at::ones({256}, on_sim()).set_requires_grad(true);
  auto y = (x * 2).exp();
  y.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("stop here"); });
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
}

}  // namespace
}  // namespace neap::testing
