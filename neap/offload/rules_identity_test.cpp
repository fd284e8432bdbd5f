// Rules 1 to 3: what counts as one storage, how much of it travels, and what never does.
#include "neap/autograd/hook_point.h"
#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/test_support.h"
#include "neap/offload/test_support.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;

// One unit with everything offloaded that can be, and an engine on it.
struct OneUnit {
  explicit OneUnit(FunctionUnits::Body body, Options options = {.keep_last = 0})
      : model({std::move(body)}), engine(all_sizes(std::move(options))) {
    engine.attach(model);
  }
  StepReport step(const at::Tensor& x) {
    model.run(0, x).sum().backward();
    return engine.take_step_report();
  }
  FunctionUnits model;
  Engine engine;
};

class Identity : public OffloadTest {};

TEST_F(Identity, Rule1_SeveralViewsOfOneStorageAreOneTransfer) {
  const at::Tensor w = weight({16, 48}), x = draw({8, 16});
  const auto body = [&](const at::Tensor& in) {
    const auto qkv = at::matmul(in, w).chunk(3, -1);
    return qkv[0] * qkv[1] * qkv[2];
  };
  body(x).sum().backward();
  const at::Tensor expected = w.grad().clone();
  w.mutable_grad().zero_();

  OneUnit unit(body);
  control().reset_counters(0);
  const StepReport report = unit.step(x);
  EXPECT_EQ(counted().d2h.bytes, report.offloaded_bytes.count);
  // x, the projection once, and q·k.
  EXPECT_EQ(report.offloaded_bytes, Bytes(bytes_of(x) + 8 * 48 * 4 + 8 * 16 * 4));
  EXPECT_EQ(report.offloaded_storages, 3);
  EXPECT_EQ(report.saved_tensors, 5);  // x, q, k, q·k, v
  EXPECT_EQ(report.kept_tensors, 0);
  EXPECT_TRUE(bit_equal(w.grad(), expected));
}

TEST_F(Identity, Rule1_OneTensorSavedByManyOperatorsTravelsOnce) {
  const at::Tensor w = weight({16, 16}), x = draw({8, 16});
  OneUnit unit([&](const at::Tensor& in) {
    const at::Tensor h = at::tanh(at::matmul(in, w));
    return h * h + h.sin() + h.cos();
  });
  const StepReport report = unit.step(x);
  EXPECT_EQ(report.offloaded_bytes, Bytes(2 * bytes_of(x)));
}

TEST_F(Identity, Rule1_AnotherVersionAndAnotherCounterAreOtherEntries) {
  const at::Tensor w = weight({16, 16}), x = draw({16, 16});
  OneUnit unit([&](const at::Tensor& in) {
    const at::Tensor buffer = in.clone();
    const at::Tensor a = buffer * w;  // buffer at version 0
    const at::Tensor other = buffer.variable_data();
    const at::Tensor b = other * w;  // the same bytes under another counter
    return a + b;
  });
  EXPECT_EQ(unit.step(x).offloaded_storages, 2);
}

TEST_F(Identity, Rule1_AReusedAddressIsNoIdentity) {
  const at::Tensor w = weight({16, 16}), x = draw({16, 16});
  const auto body = [&](const at::Tensor& in) {
    at::Tensor sum = at::zeros({}, on_sim());
    for (int i = 0; i < 8; ++i) sum = sum + (in * double(i) * w).sum();  // each product's input lies where one died
    return sum;
  };
  body(x).sum().backward();
  const at::Tensor expected = w.grad().clone();
  w.mutable_grad().zero_();
  OneUnit unit(body);
  EXPECT_EQ(unit.step(x).offloaded_storages, 8);
  EXPECT_TRUE(bit_equal(w.grad(), expected));
}

TEST_F(Identity, Rule2_ASliceOfSomethingLargeTravelsAlone) {
  const at::Tensor w = weight({4, 16}), big = draw({256, 16});
  OneUnit unit([&](const at::Tensor& in) { return in.narrow(0, 100, 4) * w; });
  const StepReport report = unit.step(big);
  EXPECT_EQ(report.offloaded_bytes, Bytes(4 * 16 * 4));
  EXPECT_TRUE(bit_equal(w.grad(), big.narrow(0, 100, 4)));
}

TEST_F(Identity, Rule2_MostOfAStorageTravelsWhole) {
  const at::Tensor w = weight({12, 16}), x = draw({16, 16});
  OneUnit unit([&](const at::Tensor& in) { return in.narrow(0, 3, 12) * w; });
  EXPECT_EQ(unit.step(x).offloaded_bytes, Bytes(bytes_of(x)));
  EXPECT_TRUE(bit_equal(w.grad(), x.narrow(0, 3, 12)));
}

TEST_F(Identity, Rule2_ASliceBelowMinBytesStays) {
  const at::Tensor w = weight({4, 16}), big = draw({256, 16});
  FunctionUnits model({[&](const at::Tensor& in) { return in.narrow(0, 100, 4) * w; }});
  Engine engine({.min_bytes = 1_KiB, .keep_last = 0});
  engine.attach(model);
  model.run(0, big).sum().backward();
  EXPECT_EQ(engine.take_step_report().offloaded_bytes, 0_B);
}

TEST_F(Identity, Rule3_ParametersBuffersAndTheirViewsStay) {
  class Model : public torch::nn::Module, public autograd::Hookable {
   public:
    Model()
        : frozen(register_parameter("frozen", draw({16, 16}), false)), buffer(register_buffer("b", draw({16, 16}))) {
      weight = register_parameter("weight", draw({16, 16}));
    }
    at::Tensor forward(const at::Tensor& x) {
      return hook_point().run({x}, [&] {
        return at::matmul(x, weight.t()) * buffer +
               at::matmul(x, frozen.t()) * buffer.view({2, 8, 16}).flatten(0, 1) * weight;
      });
    }
    at::Tensor weight, frozen, buffer;
  };
  Model model;
  Engine engine(all_sizes({.keep_last = 0}));
  engine.attach(model, {"*"});
  const at::Tensor x = weight({8, 16}), y = at::cat({x, x});
  model.forward(y).sum().backward();
  const StepReport report = engine.take_step_report();
  // y, and the product that is multiplied by the weight.
  EXPECT_EQ(report.offloaded_storages, 2);
  EXPECT_GE(report.kept_tensors, 4);
}

TEST_F(Identity, Rule3_WhatIsNoPlainTensorOfTheDeviceComesBackUntouched) {
  const at::Tensor w = weight({4}), x = draw({4}), host = at::randn({4}), empty = draw({0});
  const at::Tensor index = at::tensor({3, 1, 1}, at::kLong).to(x.device());
  at::Tensor scale = weight({});
  const auto body = [&](const at::Tensor& in) {
    const at::Tensor on_host = host * w.cpu();  // a CPU tensor is saved inside a unit on the device
    return (in * w).index_select(0, index).sum() * scale + on_host.to(in.device()).sum() +
           (empty * empty * w.sum()).sum();
  };
  body(x).backward();
  const Tensors expected = {w.grad().clone(), scale.grad().clone()};
  w.mutable_grad().reset();
  scale.mutable_grad().reset();
  OneUnit unit(body);
  unit.step(x);
  EXPECT_TRUE(bit_equal({w.grad(), scale.grad()}, expected));
}

TEST_F(Identity, Rule3_AnExpansionTravelsAsItsBase) {
  const at::Tensor w = weight({64, 16}), row = draw({1, 16});
  OneUnit unit([&](const at::Tensor& in) { return in.expand({64, 16}) * w; });
  EXPECT_EQ(unit.step(row).offloaded_bytes, Bytes(bytes_of(row)));
  EXPECT_TRUE(bit_equal(w.grad(), row.expand({64, 16}).contiguous()));
}

TEST_F(Identity, Rule3_StridesConjugateAndNegativeBitsComeBack) {
  at::manual_seed(3);
  const at::Tensor host = at::randn({6, 4}, at::kComplexDouble);
  const auto run = [&](bool offload) {
    const at::Tensor w = host.clone().set_requires_grad(true), z = host.flip(0).contiguous();
    FunctionUnits model({[&](const at::Tensor& in) {
      return at::real(in.conj().t() * w.t()).sum() + at::imag(in.conj() * w).pow(2).sum();
    }});
    Engine engine(all_sizes({.keep_last = 0}));
    if (offload) engine.attach(model);
    model.run(0, z).backward();
    return w.grad();
  };
  EXPECT_TRUE(bit_equal(run(true), run(false)));
}

// Such as a region that will be computed again: what it saves meanwhile is its own affair.
TEST_F(Identity, Rule3_InsideTheScopeOfAnotherFeatureNothingLeaves) {
  const at::Tensor w = weight({16, 16}), x = draw({16, 16});
  OneUnit unit([&](const at::Tensor& in) { return at::tanh(in * w); });
  autograd::testing::RecordingPolicy other;
  at::Tensor loss;
  {
    const autograd::SavedTensorScope scope(&other);
    loss = unit.model.run(0, x).sum();
  }
  EXPECT_GT(other.log().packed, 0);
  EXPECT_EQ(unit.engine.take_step_report().saved_tensors, 0);
  loss.backward();
  EXPECT_EQ(unit.engine.take_step_report().reloaded_storages, 0);
}

TEST_F(Identity, Rule3_ThePolicyDecidesByTensorUnitAndOperator) {
  const at::Tensor w = weight({16, 16}), x = draw({16, 16});
  std::vector<std::string> asked;
  OneUnit unit([&](const at::Tensor& in) { return at::tanh(in * w); },
               {.keep_last = 0, .policy = [&](const at::Tensor&, std::string_view name, std::string_view op) {
                  asked.push_back(std::string(name) + " " + std::string(op));
                  return op == "aten::tanh" ? Decision::kKeep : Decision::kOffload;
                }});
  const StepReport report = unit.step(x);
  EXPECT_THAT(asked, ::testing::ElementsAre("layers.0 aten::mul", "layers.0 aten::tanh"));
  EXPECT_EQ(report.offloaded_storages, 1);
}

}  // namespace
}  // namespace neap::offload
