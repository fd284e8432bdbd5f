// What a model may look like, and what is refused when it is sharded rather than later.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/error.h"
#include "testing/matchers.h"
#include "testing/sharded_training.h"

namespace neap::shard {
namespace {

using namespace testing;

using ::testing::HasSubstr;

constexpr int64_t kWidth = TestNet::kWidth;
using Parameters = std::vector<at::Tensor>;

Recipe recipe_of(std::function<std::vector<std::shared_ptr<TestUnit>>(int rank)> units, int ranks = 2) {
  Recipe recipe;
  recipe.model = [units = std::move(units)](int rank) { return test_model(std::make_shared<TestNet>(units(rank))); };
  recipe.optimizer = make_adamw;
  recipe.ranks = ranks;
  recipe.steps = 4;
  return recipe;
}

class Worlds : public ::testing::TestWithParam<int> {};

TEST_P(Worlds, HostileShapesAndMixedDtypesTrainAlike) {
  const int ranks = GetParam();
  const auto unit = [ranks] {
    const Parameters p = {parameter({}, 1),
                          parameter({0}, 2),
                          parameter({0, 4}, 3),
                          parameter({1}, 4),
                          parameter({3}, 5, at::kDouble),
                          parameter({5, 7}, 6, at::kBFloat16),
                          parameter({ranks * 3 + 1, kWidth}, 7)};
    return std::make_shared<TestUnit>(p, [](const Parameters& p, const at::Tensor& x) {
      const at::Tensor numbers = p[0] * p[3] + p[1].sum() + p[2].sum() + p[4].sum().to(at::kFloat);
      return at::linear(at::linear(x, p[6]), p[6].t()) * (numbers + p[5].to(at::kFloat).pow(2).mean());
    });
  };
  auto recipe = recipe_of([&](int) { return std::vector{unit(), dense_unit(9), unit()}; }, ranks);
  const Trained alone = train_alone(recipe);
  for (const bool fusion : {true, false}) {
    recipe.options.comm_fusion = fusion;
    EXPECT_TRUE(bit_equal(train_sharded(recipe), alone)) << (fusion ? "fused" : "one by one");
  }
}

TEST_P(Worlds, ParametersInOtherOrdersOfMemoryKeepThem) {
  const auto unit = [] {
    at::Tensor turned = parameter({kWidth, kWidth}, 21).detach().t().set_requires_grad(true);
    return std::make_shared<TestUnit>(Parameters{turned}, [](const Parameters& p, const at::Tensor& x) {
      EXPECT_EQ(p[0].stride(0), 1);
      return at::matmul(x, p[0]);
    });
  };
  auto recipe = recipe_of([&](int) { return std::vector{unit(), unit()}; }, GetParam());
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST_P(Worlds, AParameterThatOnlySomeRanksUseIsUpdatedOnAll) {
  const int ranks = GetParam();
  // The second parameter is used when `uses` says so, the third never.
  const auto unit = [](std::function<bool()> uses) {
    const Parameters p = {parameter({kWidth, kWidth}, 1), parameter({kWidth, 3}, 2), parameter({kWidth, kWidth}, 3)};
    return std::make_shared<TestUnit>(p, [uses](const Parameters& p, const at::Tensor& x) {
      const at::Tensor y = at::linear(x, p[0]);
      return uses() ? y + p[1].sum() : y;
    });
  };
  auto alone = recipe_of(
      [&](int) {
        const auto calls = std::make_shared<int>(0);
        return std::vector{unit([=] { return (*calls)++ % ranks == 0; }), dense_unit(5)};
      },
      ranks);
  auto sharded = recipe_of(
      [&](int rank) {
        return std::vector{unit([=] { return rank == 0; }), dense_unit(5)};
      },
      ranks);
  sharded.at_end = [](Sharded& handle, TestModel&, int) {
    for (const Shard& shard : handle.shards()) {
      if (shard.name != "layers.0.p2" || shard.end == shard.begin) continue;
      // Never used: AdamW has not even decayed it.
      const at::Tensor whole = parameter({kWidth, kWidth}, 3).detach().view(-1);
      EXPECT_TRUE(testing::bit_equal(shard.data.detach(), whole.slice(0, shard.begin, shard.end)));
    }
  };
  EXPECT_TRUE(bit_equal(train_sharded(sharded), train_alone(alone)));
}

TEST_P(Worlds, FrozenUnitsAndHalfFrozenOnesTrainAlikeWithoutGradientMemory) {
  const auto lora = [] {
    at::Tensor frozen = parameter({kWidth, kWidth}, 1).set_requires_grad(false);
    return std::make_shared<TestUnit>(Parameters{frozen, parameter({2, kWidth}, 2), parameter({kWidth, 2}, 3)},
                                      [](const Parameters& p, const at::Tensor& x) {
                                        return at::linear(x, p[0]) + at::linear(at::linear(x, p[1]), p[2]);
                                      });
  };
  const auto frozen = [] {
    // As Python makes it: it never required gradients, and has nothing of autograd's.
    return std::make_shared<TestUnit>(Parameters{parameter({kWidth, kWidth}, 8).detach()},
                                      [](const Parameters& p, const at::Tensor& x) { return at::linear(x, p[0]); });
  };
  auto recipe = recipe_of([&](int) { return std::vector{lora(), frozen(), lora()}; }, GetParam());
  recipe.optimizer = make_sgd;
  recipe.at_end = [](Sharded& sharded, TestModel& model, int) {
    EXPECT_EQ(sharded.usage().scatters, 2 * 4);  // of the two units with something to train
    for (const at::Tensor& p : model.module->parameters()) EXPECT_FALSE(p.grad().defined());
  };
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST_P(Worlds, AUnitThatRunsSeveralTimesInOneForwardTrainsAlike) {
  auto recipe = recipe_of([](int) { return std::vector{dense_unit(1), dense_unit(2)}; }, GetParam());
  recipe.model = [](int) {
    const auto net = std::make_shared<TestNet>(std::vector{dense_unit(1), dense_unit(2)});
    return TestModel{net, [net](int64_t micro_batch) {
                       at::Tensor x = TestNet::input(micro_batch);
                       for (const std::size_t i : {0, 1, 0, 0, 1}) x = net->unit(i).forward(x);
                       return x.pow(2).mean();
                     }};
  };
  EXPECT_TRUE(bit_equal(train_sharded(recipe), train_alone(recipe)));
}

TEST_P(Worlds, ATiedParameterOfOneUnitIsOne) {
  const auto unit = [] {
    const at::Tensor tied = parameter({kWidth, kWidth}, 1);
    return std::make_shared<TestUnit>(Parameters{tied, tied}, [](const Parameters& p, const at::Tensor& x) {
      return at::linear(at::linear(x, p[0]).tanh(), p[1].t());
    });
  };
  auto recipe = recipe_of([&](int) { return std::vector{unit()}; }, GetParam());
  recipe.at_end = [](Sharded& sharded, TestModel&, int) { EXPECT_EQ(sharded.shards().size(), 1); };
  auto alone = train_alone(recipe);
  alone.parameters.erase("layers.0.p1");
  EXPECT_TRUE(bit_equal(train_sharded(recipe), alone));
}

TEST_P(Worlds, ARetainedGraphGivesItsGradientsTwice) {
  const int ranks = GetParam();
  std::vector<TestModel> models;
  for (int rank = 0; rank < ranks; ++rank) {
    models.push_back(test_model(std::make_shared<TestNet>(std::vector{dense_unit(1), dense_unit(2)})));
  }
  testing::run_ranks(ranks, [&](comm::World& world) {
    TestModel& model = models[static_cast<std::size_t>(world.rank())];
    Sharded sharded = fully_shard(*model.module, world.groups(comm::Mesh(world.size(), world.rank())));
    const at::Tensor loss = sharded.run([&] { return model.loss(world.rank()); });
    loss.backward({}, /*retain_graph=*/true);
    const Parameters p = sharded.parameters();
    Parameters once;
    for (const at::Tensor& parameter : p) once.push_back(parameter.grad().clone());
    loss.backward();
    for (std::size_t i = 0; i < p.size(); ++i) EXPECT_TRUE(testing::bit_equal(p[i].grad(), once[i] * 2));
    EXPECT_EQ(sharded.usage().unsharded, Bytes(0));
  });
}

TEST_P(Worlds, UnfreezingAfterAStepIsNoticed) {
  const int ranks = GetParam();
  std::vector<std::shared_ptr<TestNet>> nets;
  for (int rank = 0; rank < ranks; ++rank) {
    nets.push_back(std::make_shared<TestNet>(std::vector{dense_unit(1), dense_unit(2)}));
    nets.back()->unit(0).parameter(0).set_requires_grad(false);
  }
  testing::run_ranks(ranks, [&](comm::World& world) {
    TestNet& net = *nets[static_cast<std::size_t>(world.rank())];
    Sharded sharded = fully_shard(net, world.groups(comm::Mesh(world.size(), world.rank())));
    sharded.run([&] { return net.loss(0); }).backward();
    EXPECT_FALSE(net.unit(0).parameter(0).grad().defined());
    net.unit(0).parameter(0).set_requires_grad(true);
    sharded.run([&] { return net.loss(0); }).backward();
    EXPECT_TRUE(net.unit(0).parameter(0).grad().defined());
    EXPECT_EQ(net.unit(0).parameter(0).grad().numel(), net.unit(0).parameter(0).numel());
  });
}

TEST_P(Worlds, TwoModelsTakeTurns) {
  const int ranks = GetParam();
  auto recipe = recipe_of([](int) { return std::vector{dense_unit(1), dense_unit(2)}; }, ranks);
  const Trained alone = train_alone(recipe);
  std::vector<TestModel> models;
  for (int i = 0; i < 2 * ranks; ++i) models.push_back(recipe.model(0));
  testing::run_ranks(ranks, [&](comm::World& world) {
    const auto groups = world.groups(comm::Mesh(world.size(), world.rank()));
    std::vector<Sharded> sharded;
    std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
    for (int i = 0; i < 2; ++i) {
      torch::nn::Module& module = *models[static_cast<std::size_t>(2 * world.rank() + i)].module;
      sharded.push_back(fully_shard(module, groups));
      optimizers.push_back(make_adamw(module.parameters()));
    }
    for (int64_t step = 0; step < recipe.steps; ++step) {
      std::vector<at::Tensor> losses;
      for (std::size_t i = 0; i < 2; ++i) {
        const TestModel& model = models[2 * static_cast<std::size_t>(world.rank()) + i];
        losses.push_back(sharded[i].run([&] { return model.loss(step * ranks + world.rank()); }));
      }
      for (const at::Tensor& loss : losses) loss.backward();
      for (const auto& optimizer : optimizers) {
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    for (Sharded& one : sharded) {
      const auto state = one.full_state();
      if (world.rank() != 0) continue;
      for (const auto& [name, value] : alone.parameters) EXPECT_TRUE(testing::bit_equal(state.at(name), value)) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Worlds, ::testing::Values(1, 2, 3));

// ---- refused

void expect_refused(TestNet& net, const std::vector<std::string>& modules, const std::string& text) {
  Options options;
  options.modules = modules;
  testing::run_ranks(1, [&](comm::World& world) {
    EXPECT_THAT(message_of([&] { fully_shard(net, world.groups(comm::Mesh(1, 0)), options); }), HasSubstr(text));
  });
}

// Units before and after a list of layers, that share their weight or do not.
class Sandwich : public torch::nn::Module {
 public:
  explicit Sandwich(bool tied) {
    const at::Tensor weight = parameter({kWidth, kWidth}, 1);
    first_ = register_module("first", unit_of(weight));
    body_ = register_module("body", std::make_shared<TestNet>(std::vector{dense_unit(2), dense_unit(3)}));
    last_ = register_module("last", unit_of(tied ? weight : parameter({kWidth, kWidth}, 4)));
  }
  at::Tensor loss(int64_t micro_batch) {
    at::Tensor x = first_->forward(TestNet::input(micro_batch));
    for (const std::size_t i : {0, 1}) x = body_->unit(i).forward(x);
    return last_->forward(x).pow(2).mean();
  }

 private:
  static std::shared_ptr<TestUnit> unit_of(const at::Tensor& weight) {
    return std::make_shared<TestUnit>(Parameters{weight},
                                      [](const Parameters& p, const at::Tensor& x) { return at::linear(x, p[0]); });
  }
  std::shared_ptr<TestUnit> first_, last_;
  std::shared_ptr<TestNet> body_;
};

TEST_P(Worlds, HookPointsBesideTheLayersAreUnitsUnlessTheyAreTied) {
  for (const bool tied : {false, true}) {
    Recipe recipe = recipe_of({}, GetParam());
    recipe.model = [=](int) {
      const auto net = std::make_shared<Sandwich>(tied);
      return TestModel{net, [net](int64_t micro_batch) { return net->loss(micro_batch); }};
    };
    recipe.at_end = [=](Sharded& sharded, TestModel&, int) {
      const auto layers = std::vector<std::string>{"body.layers.0", "body.layers.1", ""};
      const auto all = std::vector<std::string>{"first", "body.layers.0", "body.layers.1", "last", ""};
      EXPECT_EQ(sharded.unit_names(), tied ? layers : all);
    };
    Trained alone = train_alone(recipe);
    if (tied) alone.parameters.erase("last.p0");  // sharded, it has one name
    EXPECT_TRUE(bit_equal(train_sharded(recipe), alone)) << (tied ? "tied" : "each its own");
  }
}

TEST(Refused, AParameterOfTwoUnits) {
  const at::Tensor tied = parameter({kWidth, kWidth}, 1);
  const auto unit = [&] {
    return std::make_shared<TestUnit>(Parameters{tied},
                                      [](const Parameters& p, const at::Tensor& x) { return at::linear(x, p[0]); });
  };
  TestNet net({unit(), unit()});
  expect_refused(net, {}, "'layers.1.p0' of unit 'layers.1' and 'layers.0.p0' of unit 'layers.0' are the same");
}

TEST(Refused, TwoParametersOverOneMemory) {
  const at::Tensor whole = at::randn({kWidth, kWidth});
  const Parameters views = {whole.narrow(0, 0, 5).detach().set_requires_grad(true),
                            whole.narrow(0, 4, 4).detach().set_requires_grad(true)};
  TestNet net({std::make_shared<TestUnit>(views, [](const Parameters&, const at::Tensor& x) { return x; })});
  expect_refused(net, {}, "'layers.0.p1' and 'layers.0.p0' overlap");
}

TEST(Refused, AGradientOrAGraphFromBefore) {
  TestNet net({dense_unit(1)});
  at::Tensor loss = net.loss(0);
  expect_refused(net, {}, "no graph to be alive");
  loss.backward();
  loss.reset();
  expect_refused(net, {}, "call zero_grad() first");
}

TEST(Refused, PatternsThatMatchNothing) {
  TestNet net({dense_unit(1)});
  expect_refused(net, {"layer.{*}"}, "[shard.modules]");
}

TEST(Refused, AModelThatIsShardedAlready) {
  TestNet net({dense_unit(1)});
  testing::run_ranks(1, [&](comm::World& world) {
    const Sharded sharded = fully_shard(net, world.groups(comm::Mesh(1, 0)));
    EXPECT_THAT(message_of([&] { fully_shard(net, world.groups(comm::Mesh(1, 0))); }), HasSubstr("sharded already"));
  });
}

}  // namespace
}  // namespace neap::shard
