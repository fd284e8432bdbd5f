// Random numbers: a generator per device, reproducible, independent, saved and restored as recomputation needs it.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>

#include <thread>

#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

class Random : public SimTest {
 protected:
  static at::Generator generator(int device = 0) { return at::globalContext().defaultGenerator(sim(device)); }
  static at::Tensor draw(int device = 0) { return at::rand({16}, on_sim(device)); }
};

TEST_F(Random, OneSeedForAllDevicesGivesTheNumbersOfTheCpu) {
  at::manual_seed(7);
  const auto there = at::randn({33}, on_sim()), here = at::randn({33});
  EXPECT_TRUE(bit_equal(there, here));
}

TEST_F(Random, OperatorsWithoutAGeneratorUseTheDevicesOwn) {
  control().manual_seed(5, 0);
  control().manual_seed(5, 1);
  const auto cpu_state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  const auto first = draw();
  EXPECT_FALSE(bit_equal(draw(), first));
  EXPECT_TRUE(bit_equal(draw(1), first));
  EXPECT_TRUE(bit_equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), cpu_state));
  at::rand({16});  // the CPU's draws do not move the device
  control().manual_seed(5, 0);
  EXPECT_TRUE(bit_equal(draw(), first));
}

TEST_F(Random, StateIsSavedAndRestored) {
  const auto x = at::ones({64}, on_sim());
  const auto state = generator().get_state();
  const auto first = at::dropout(x, 0.5, true), second = at::dropout(x, 0.5, true);
  EXPECT_FALSE(bit_equal(first, second));
  auto device_generator = generator();
  device_generator.set_state(state);
  EXPECT_TRUE(bit_equal(at::dropout(x, 0.5, true), first));
  EXPECT_TRUE(bit_equal(at::dropout(x, 0.5, true), second));
}

TEST_F(Random, GeneratorsOfOnesOwnAreIndependent) {
  auto own = at::detail::getPrivateUse1Hooks().getNewGenerator(0);
  EXPECT_EQ(own.device(), sim());
  own.set_current_seed(3);
  EXPECT_EQ(own.current_seed(), 3u);
  const auto copy = own.clone();
  const auto first = at::randperm(10, own, on_sim().dtype(at::kLong));
  EXPECT_EQ(first.device(), sim());
  EXPECT_TRUE(bit_equal(at::randperm(10, copy, on_sim().dtype(at::kLong)), first));
}

TEST_F(Random, EveryKindOfDrawEqualsTheCpus) {
  const auto probabilities = at::rand({8, 8});
  const auto run = [&](c10::Device device) {
    at::manual_seed(11);
    const auto p = probabilities.to(device);
    auto filled = at::empty({40}, at::TensorOptions().device(device));
    return std::vector<at::Tensor>{at::bernoulli(p),
                                   at::multinomial(p, 3),
                                   at::randint(5, {7}, at::TensorOptions().device(device)),
                                   at::randperm(9, at::TensorOptions().device(device)),
                                   at::normal(p, p),
                                   filled.uniform_(-1, 1).clone(),
                                   filled.normal_(2, 3).clone(),
                                   filled.exponential_().clone(),
                                   filled.random_(0, 9).clone(),
                                   std::get<0>(at::native_dropout(p, 0.3, true)),
                                   at::rand_like(p)};
  };
  EXPECT_TRUE(bit_equal(run(sim()), run(at::kCPU)));
}

TEST_F(Random, ThreadsMayDrawAtTheSameTime) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([] {
      for (int round = 0; round < 50; ++round) EXPECT_LT(at::rand({64}, on_sim()).max().item<float>(), 1);
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace neap::testing
