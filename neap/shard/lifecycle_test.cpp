// What happens to parameters and memory around training: failures, reads at the wrong time, loading.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include "neap/base/error.h"
#include "neap/shard/test_support.h"
#include "testing/matchers.h"

namespace neap::shard {
namespace {

using namespace testing;

using ::testing::AllOf;
using ::testing::HasSubstr;

using Parameters = std::vector<at::Tensor>;

TEST(Lifecycle, ParametersAreOneObjectWhateverTheyLookAt) {
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    const at::Tensor handle = net.unit(1).parameter(0);
    const void* object = handle.unsafeGetTensorImpl();
    EXPECT_EQ(handle.sizes(), at::IntArrayRef({kSide * kSide / 2}));
    sharded.with_full_parameters([&] {
      EXPECT_EQ(handle.sizes(), at::IntArrayRef({kSide, kSide}));
      EXPECT_TRUE(bit_equal(handle.detach(), parameter({kSide, kSide}, 2).detach()));
    });
    EXPECT_EQ(net.unit(1).parameter(0).unsafeGetTensorImpl(), object);
    EXPECT_EQ(net.parameters()[1].unsafeGetTensorImpl(), object);
    EXPECT_EQ(sharded.parameters()[1].unsafeGetTensorImpl(), object);
    expect_at_rest(sharded);
  });
}

TEST(Lifecycle, AViewKeptFromBeforeSaysWhichUnitIsResharded) {
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    at::Tensor kept;
    sharded.with_full_parameters([&] { kept = net.unit(1).parameter(0).detach().t(); });
    const auto text = AllOf(HasSubstr("'layers.1' is resharded"), HasSubstr("with_full_parameters()"));
    EXPECT_THAT(message_of([&] { kept.sum(); }), text);
    EXPECT_THAT(message_of([&] { kept.fill_(1); }), text);
    EXPECT_THAT(message_of([&] { kept.clone(); }), text);
    sharded.with_full_parameters([&] { EXPECT_NO_THROW(kept.sum()); });
  });
}

TEST(Lifecycle, AForwardAroundTheHooksIsAnError) {
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    EXPECT_ANY_THROW(net.unit(0).body(TestNet::input(0)));  // the operators do not take the shape of a piece
    EXPECT_THAT(message_of([&] { net.unit(1).parameter(0).sum().backward(); }),  // this one does, so backward tells
                AllOf(HasSubstr("'layers.1.p0'"), HasSubstr("without the unit's hooks")));
    net.unit(1).parameter(0).mutable_grad().reset();
    sharded.run([&] { return net.loss(0); }).backward();
    expect_at_rest(sharded);
  });
}

TEST(Lifecycle, AUnitOutsideOfTheModelsForwardNamesTheRootsParameters) {
  const auto recipe_model = rotary_decoder();
  testing::run_ranks(1, [&](comm::World& world) {
    Options options;
    options.param_dtype = at::kDouble;  // one rank of one dtype would have nothing to gather
    const Sharded sharded = fully_shard(*recipe_model.module, world.groups(comm::Mesh(1, 0)), options);
    auto* layer = dynamic_cast<autograd::Hookable*>(recipe_model.module->named_modules()["layers.0"].get());
    ASSERT_NE(layer, nullptr);
    EXPECT_THAT(message_of([&] { layer->hook_point().run({}, [] { return at::ones({}); }); }),
                AllOf(HasSubstr("'embedding'"), HasSubstr("sharded.run(")));
  });
}

TEST(Lifecycle, WritingToAFullParameterIsNoticed) {
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    const auto write = [&] {
      const at::NoGradGuard no_grad;
      net.unit(0).parameter(0).fill_(2);
      return at::ones({});
    };
    EXPECT_THAT(message_of([&] { net.unit(0).hook_point().run({}, write); }), HasSubstr("'layers.0.p0' was written"));
    const at::Tensor before = net.unit(0).parameter(0).detach().clone();
    EXPECT_THAT(message_of([&] { sharded.with_full_parameters([&] { write(); }); }),
                AllOf(HasSubstr("'layers.0.p0' was written"), HasSubstr("with write_back")));
    EXPECT_TRUE(bit_equal(net.unit(0).parameter(0).detach(), before));
    expect_at_rest(sharded);
    sharded.with_full_parameters([&] { write(); }, /*write_back=*/true);
    EXPECT_TRUE(bit_equal(net.unit(0).parameter(0).detach(), at::full({kSide * kSide / 2}, 2.0F)));
    expect_at_rest(sharded);
  });
}

// ---- failures

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(Failure, InForwardLeavesEveryUnitReshardedAndTheNextStepRight) {
  for (const Stage stage : {Stage::kOptimizer, Stage::kGradients, Stage::kParameters}) {
    Options options;
    options.stage = stage;
    on_ranks(2, options, [](comm::World&, TestNet& net, Sharded& sharded) {
      sharded.run([&] { return net.loss(0); }).backward();
      std::vector<at::Tensor> expected;
      for (const at::Tensor& p : net.parameters()) expected.push_back(std::exchange(p.mutable_grad(), at::Tensor()));
      EXPECT_THROW(sharded.run([&] {
        at::Tensor x = net.unit(1).forward(net.unit(0).forward(TestNet::input(0)));
        return net.unit(2).hook_point().run({x}, [&]() -> at::Tensor { throw Broken("out of luck"); });
      }),
                   Broken);
      expect_at_rest(sharded);
      sharded.run([&] { return net.loss(0); }).backward();
      const auto p = net.parameters();
      for (std::size_t i = 0; i < p.size(); ++i) EXPECT_TRUE(bit_equal(p[i].grad(), expected[i]));
    });
  }
}

TEST(Failure, InBackwardLeavesEveryUnitReshardedAndTheNextStepRight) {
  for (const Stage stage : {Stage::kOptimizer, Stage::kGradients, Stage::kParameters}) {
    Options options;
    options.stage = stage;
    on_ranks(2, options, [](comm::World&, TestNet& net, Sharded& sharded) {
      sharded.run([&] { return net.loss(0); }).backward();
      std::vector<at::Tensor> expected;
      for (const at::Tensor& p : net.parameters()) expected.push_back(p.grad().clone());
      EXPECT_THROW(
          {
            const at::Tensor loss = sharded.run([&] {
              at::Tensor x = net.unit(0).forward(TestNet::input(0));
              x.register_hook([](const at::Tensor&) -> at::Tensor { throw Broken("out of memory"); });
              return net.unit(2).forward(net.unit(1).forward(x)).sum();
            });
            loss.backward();
          },
          Broken);
      expect_at_rest(sharded);
      // The gradients from before the failed pass are there, unchanged.
      const auto p = net.parameters();
      for (std::size_t i = 0; i < p.size(); ++i) {
        EXPECT_TRUE(bit_equal(p[i].grad(), expected[i]));
        p[i].mutable_grad().reset();
      }
      sharded.run([&] { return net.loss(0); }).backward();
      for (std::size_t i = 0; i < p.size(); ++i) EXPECT_TRUE(bit_equal(p[i].grad(), expected[i]));
    });
  }
}

TEST(Failure, OfOneRankEndsTheOthersWithItsName) {
  const std::string text = message_of([] {
    on_ranks(2, {}, [](comm::World& world, TestNet& net, Sharded& sharded) {
      sharded.run([&] {
        at::Tensor x = net.unit(0).forward(TestNet::input(0));
        if (world.rank() == 1) throw Broken("rank 1 is out of memory");
        return net.unit(2).forward(net.unit(1).forward(x));
      });
    });
  });
  EXPECT_THAT(text, HasSubstr("rank 1 is out of memory"));
}

TEST(Lifecycle, AForwardWithoutABackwardLeavesNothingUnsharded) {
  Options options;
  options.stage = Stage::kGradients;
  on_ranks(2, options, [](comm::World&, TestNet& net, Sharded& sharded) {
    {
      const at::NoGradGuard no_grad;
      sharded.run([&] { return net.loss(0); });
    }
    expect_at_rest(sharded);
    sharded.run([&] { return net.loss(0); });
    EXPECT_GT(sharded.usage().unsharded, Bytes(0));  // kept for a backward that may come
    sharded.reshard();
    expect_at_rest(sharded);
  });
}

// ---- values

TEST(State, FullStateIsWhatTheModelHadAndLoadsIntoAnotherWorld) {
  std::map<std::string, at::Tensor> state;
  on_ranks(3, {}, [&](comm::World& world, TestNet&, Sharded& sharded) {
    auto mine = sharded.full_state();
    EXPECT_EQ(mine.size(), world.rank() == 0 ? 3 : 0);
    if (world.rank() == 0) state = std::move(mine);
  });
  EXPECT_TRUE(bit_equal(state.at("layers.2.p0"), parameter({kSide, kSide}, 3).detach()));
  for (auto& [name, value] : state) value = value * 3;
  on_ranks(2, {}, [&](comm::World& world, TestNet&, Sharded& sharded) {
    sharded.load_full_state(state);
    const auto loaded = sharded.full_state();
    if (world.rank() == 0) {
      for (const auto& [name, value] : state) EXPECT_TRUE(bit_equal(loaded.at(name), value)) << name;
    }
    auto wrong = state;
    wrong.erase("layers.1.p0");
    EXPECT_THAT(message_of([&] { sharded.load_full_state(wrong); }), HasSubstr("'layers.1.p0'"));
    wrong = state;
    wrong["layers.0.p0"] = at::ones({kSide});
    EXPECT_THAT(message_of([&] { sharded.load_full_state(wrong); }), HasSubstr("of shape"));
  });
}

TEST(State, PiecesOfAnotherWorldAreCutAnew) {
  std::vector<Shard> pieces[3];
  on_ranks(3, {}, [&](comm::World& world, TestNet&, Sharded& sharded) {
    for (Shard shard : sharded.shards()) {
      shard.data = shard.data.detach() * 2;
      pieces[world.rank()].push_back(shard);
    }
  });
  std::vector<Shard> all;
  for (const auto& some : pieces) all.insert(all.end(), some.begin(), some.end());
  on_ranks(2, {}, [&](comm::World& world, TestNet&, Sharded& sharded) {
    sharded.load_shards(all);
    const auto state = sharded.full_state();
    if (world.rank() == 0) {
      EXPECT_TRUE(bit_equal(state.at("layers.1.p0"), parameter({kSide, kSide}, 2).detach() * 2));
    }
    EXPECT_THAT(message_of([&] { sharded.load_shards(pieces[2]); }), HasSubstr("that cover elements"));
  });
}

TEST(State, AFlatShardStepsAllItsParametersAtOnce) {
  on_ranks(2, {}, [](comm::World&, TestNet& net, Sharded& sharded) {
    sharded.run([&] { return net.loss(0); }).backward();
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> expected;
    for (const at::Tensor& p : sharded.parameters()) expected.push_back(p - p.grad() * 0.5);
    for (const FlatShard& flat : sharded.flat_shards()) {
      ASSERT_TRUE(flat.gradient.defined());
      flat.data.sub_(flat.gradient * 0.5);
    }
    const auto parameters = sharded.parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(bit_equal(parameters[i].detach(), expected[i]));
    parameters[0].mutable_grad().reset();
    EXPECT_FALSE(sharded.flat_shards()[0].gradient.defined());
  });
}

TEST(State, DataThatWasReplacedIsTakenOver) {
  on_ranks(2, {}, [](comm::World& world, TestNet& net, Sharded& sharded) {
    net.unit(0).parameter(0).set_data(at::full({kSide * kSide / 2}, 7.0F));  // a piece
    net.unit(1).parameter(0).set_data(at::full({kSide, kSide}, 9.0F));       // the whole
    const auto state = sharded.full_state();
    if (world.rank() == 0) {
      EXPECT_TRUE(bit_equal(state.at("layers.0.p0"), at::full({kSide, kSide}, 7.0F)));
      EXPECT_TRUE(bit_equal(state.at("layers.1.p0"), at::full({kSide, kSide}, 9.0F)));
    }
    EXPECT_EQ(net.unit(0).parameter(0).storage().unsafeGetStorageImpl(),
              sharded.shards()[0].data.storage().unsafeGetStorageImpl());
    net.to(at::kDouble);
    EXPECT_THAT(message_of([&] { sharded.run([&] { return net.loss(0); }); }),
                AllOf(HasSubstr("'layers.0.p0'"), HasSubstr("before fully_shard()")));
  });
}

TEST(State, DissolvingGivesFullParametersBackAndAllowsAnotherSharding) {
  std::vector<std::shared_ptr<TestNet>> nets = {three_units(), three_units()};
  testing::run_ranks(2, [&](comm::World& world) {
    TestNet& net = *nets[static_cast<std::size_t>(world.rank())];
    const auto groups = world.groups(comm::Mesh(2, world.rank()));
    const void* object = net.unit(0).parameter(0).unsafeGetTensorImpl();
    for (int round = 0; round < 2; ++round) {
      Sharded sharded = fully_shard(net, groups);
      sharded.run([&] { return net.loss(0); }).backward();
      sharded.dissolve();
      EXPECT_TRUE(bit_equal(net.unit(0).parameter(0).detach(), parameter({kSide, kSide}, 1).detach()));
      EXPECT_EQ(net.unit(0).parameter(0).unsafeGetTensorImpl(), object);
    }
    net.loss(0).backward();
    EXPECT_EQ(net.unit(0).parameter(0).grad().dim(), 2);
  });
}

TEST(State, AModelOfTheMetaDeviceIsFilledGroupByGroup) {
  const auto meta_unit = [] {
    return std::make_shared<TestUnit>(
        Parameters{at::empty({kSide, kSide}, at::TensorOptions().device(at::kMeta)).set_requires_grad(true)},
        [](const Parameters& p, const at::Tensor& x) { return at::linear(x, p[0]).tanh(); });
  };
  const auto make = [&] { return std::make_shared<TestNet>(std::vector{meta_unit(), meta_unit(), meta_unit()}); };
  const std::vector<std::shared_ptr<TestNet>> nets = {make(), make()};
  Options options;
  options.device = at::kCPU;
  options.initialize = [](const std::string& name, const at::Tensor& full) {
    const uint64_t seed = static_cast<uint64_t>(name[7] - '0') + 1;  // layers.N.p0
    full.copy_(parameter({kSide, kSide}, seed).detach());
  };
  const auto real = three_units();
  const at::Tensor expected = real->loss(0).detach();
  testing::run_ranks(2, [&](comm::World& world) {
    TestNet& net = *nets[static_cast<std::size_t>(world.rank())];
    const at::Tensor handle = net.unit(0).parameter(0);
    Sharded sharded = fully_shard(net, world.groups(comm::Mesh(2, world.rank())), options);
    EXPECT_TRUE(handle.is_cpu());
    const at::Tensor loss = sharded.run([&] { return net.loss(0); });
    EXPECT_TRUE(bit_equal(loss.detach(), expected));
    loss.backward();
    EXPECT_EQ(handle.grad().numel(), handle.numel());
    expect_at_rest(sharded);
  });
}

// ---- gradients

TEST(Layout, CutsBetweenRowsWhereAsked) {
  Options options;
  options.block_of = [](const std::string&, at::IntArrayRef sizes) { return sizes.size() == 2 ? sizes[1] : 1; };
  on_ranks(3, options, [](comm::World&, TestNet&, Sharded& sharded) {
    for (const Shard& shard : sharded.shards()) {
      EXPECT_EQ(shard.begin % kSide, 0);
      EXPECT_EQ(shard.end % kSide, 0);
    }
  });
}

}  // namespace
}  // namespace neap::shard
