// Rule 6's last sentence and the engine's promise to be thread-safe: units on several threads and on several streams at
// once, with the hazard checker on.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <barrier>
#include <optional>
#include <thread>

#include "neap/device/device.h"
#include "neap/offload/test_support.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;

class Concurrency : public OffloadTest {
 protected:
  static constexpr int kUnits = 4;
  static constexpr int64_t kSide = 32;

  // Units that all threads run. Their weights want no gradient: threads would add to it in the order they come.
  void SetUp() override {
    OffloadTest::SetUp();
    std::vector<FunctionUnits::Body> bodies;
    for (int i = 0; i < kUnits; ++i) {
      bodies.push_back([w = draw({kSide, kSide})](const at::Tensor& x) { return at::tanh(at::matmul(x, w)) * w; });
    }
    model_ = std::make_unique<FunctionUnits>(std::move(bodies));
    for (int i = 0; i < kThreads; ++i) inputs_.push_back(weight({kSide, kSide}));
  }
  void TearDown() override {
    model_.reset();
    inputs_.clear();
    OffloadTest::TearDown();
  }

  at::Tensor gradient(size_t thread) const {
    return torch::autograd::grad({model_->forward(inputs_[thread]).sum()}, {inputs_[thread]})[0];
  }
  // Everything leaves, so that every storage makes the whole way in each pass.
  static Options everything() { return all_sizes({.prefetch = Layers{1}, .keep_last = 0, .max_in_flight = 0_B}); }

  static constexpr int kThreads = 4;
  std::unique_ptr<FunctionUnits> model_;
  Tensors inputs_;
};

TEST_F(Concurrency, Rule11_PassesOfSeveralThreadsKeepSeparateTapes) {
  Tensors expected;
  for (int i = 0; i < kThreads; ++i) expected.push_back(gradient(static_cast<size_t>(i)).cpu());
  synchronize();
  throttle_copies(0.5, 0.5);
  Engine engine(everything());
  engine.attach(*model_);
  constexpr int kRounds = 8;
  std::barrier together(kThreads);
  std::vector<Tensors> found(kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        together.arrive_and_wait();
        found[i].push_back(gradient(i).cpu());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kThreads; ++i) {
    for (int round = 0; round < kRounds; ++round) EXPECT_TRUE(bit_equal(found[i][round], expected[i])) << i;
  }
  const StepReport report = engine.take_step_report();
  EXPECT_EQ(report.passes, kThreads * kRounds);
  EXPECT_GT(report.reloaded_storages, 0);
}

TEST_F(Concurrency, AThreadMayEndBetweenItsForwardAndItsBackward) {
  const at::Tensor expected = gradient(0).cpu();
  Engine engine(everything());
  engine.attach(*model_);
  at::Tensor loss;
  std::thread([&] { loss = model_->forward(inputs_[0]).sum(); }).join();
  EXPECT_TRUE(bit_equal(torch::autograd::grad({loss}, {inputs_[0]})[0].cpu(), expected));
}

// Units take turns on two streams, and a unit's backward runs on the stream of its forward: what one stream saved, or
// what was reloaded for it, is used on the other.
TEST_F(Concurrency, Rule6_UnpackIsRightOnAStreamThatNeitherSavedNorLoaded) {
  const c10::impl::VirtualGuardImpl guard(kSim);
  const c10::Device device(kSim, 0);
  const c10::Stream home = guard.getDefaultStream(device);
  const c10::Stream sides[] = {guard.getStreamFromGlobalPool(device), guard.getStreamFromGlobalPool(device)};
  const auto follow = [](const c10::Stream& later, const c10::Stream& earlier) {
    c10::Event event(kSim);
    event.record(earlier);
    event.block(later);
  };
  // What goes from one unit to the next is saved by both, one on each stream.
  Tensors weights;
  std::vector<FunctionUnits::Body> bodies;
  for (int i = 0; i < kUnits; ++i) {
    weights.push_back(weight({kSide, kSide}));
    bodies.push_back([w = weights.back()](const at::Tensor& x) { return at::tanh(at::matmul(x, w)); });
  }
  FunctionUnits model(std::move(bodies));
  const auto run = [&](std::optional<Options> options) {
    std::optional<Engine> engine;
    if (options) {
      engine.emplace(*options);
      engine->attach(model);
    }
    at::Tensor hidden = inputs_[0];
    c10::Stream last = home;
    for (size_t unit = 0; unit < kUnits; ++unit) {
      const c10::Stream& side = sides[unit % 2];
      follow(side, last);
      const c10::StreamGuard on(side);
      hidden = model.run(unit, hidden);
      last = side;
    }
    follow(home, last);
    const at::Tensor loss = hidden.sum();
    hidden.reset();
    Tensors grads = torch::autograd::grad({loss}, weights);
    for (at::Tensor& grad : grads) grad = grad.cpu();
    if (engine) {
      const StepReport report = engine->take_step_report();
      EXPECT_GT(report.reloaded_storages, 0);
    }
    synchronize();
    return grads;
  };
  const Tensors expected = run(std::nullopt);
  for (const double gbps : {0.0, 0.05}) {
    throttle_copies(gbps, gbps);
    for (const Prefetch& prefetch : {Prefetch(0_B), Prefetch(Layers{1}), Prefetch(Layers{3})}) {
      Options options = everything();
      options.prefetch = prefetch;
      for (int step = 0; step < 2; ++step) EXPECT_TRUE(bit_equal(run(options), expected)) << to_string(prefetch);
    }
  }
}

// The graph would keep the tensor until backward, the engine lets go of it earlier. It sees a tensor that is saved on
// two streams; whoever only reads one on another stream than its own says so to the allocator (docs/offload.md).
TEST_F(Concurrency, Rule5_MemorySavedOnTwoStreamsIsNotGivenOutWhileEitherStillReads) {
  configure([](sim::DeviceConfig& config) { config.gflops = 0.01; });  // kernels are far behind the host
  const c10::impl::VirtualGuardImpl guard(kSim);
  const c10::Device device(kSim, 0);
  const c10::Stream home = guard.getDefaultStream(device);
  const c10::Stream side = guard.getStreamFromGlobalPool(device);
  const at::Tensor w = weight({kSide, kSide}), v = weight({kSide, kSide});
  FunctionUnits model({[&](const at::Tensor& x) { return at::tanh(at::matmul(x, w)); },
                       [&](const at::Tensor& x) { return at::tanh(at::matmul(x, v)); }});
  const auto follow = [](const c10::Stream& later, const c10::Stream& earlier) {
    c10::Event event(kSim);
    event.record(earlier);
    event.block(later);
  };
  Engine engine(everything());
  engine.attach(model);
  at::Tensor hidden = model.run(0, inputs_[0]);
  follow(side, home);
  {
    const c10::StreamGuard on(side);
    hidden = model.run(1, hidden);
  }
  const at::Tensor others = at::zeros({8, kSide, kSide}, on_sim());  // on the home stream, which waits for nobody
  follow(home, side);
  hidden.sum().backward();
  synchronize();
  w.mutable_grad().reset(), v.mutable_grad().reset();
}

}  // namespace
}  // namespace neap::offload
