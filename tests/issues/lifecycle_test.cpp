// Passes that do not go the usual way. VeOmni pull 965 (second unpack, exception between pack and unpack, two models,
// two passes before backward), TRL 4280, 4236 and 5700 (leftovers asserted on or leaked), NeMo-RL 2279 (forward-only
// passes), unsloth 3828 (first touch under inference mode), HyperParallel pull 894 (a copy loop that fails midway).
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>

#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class Lifecycle : public IssueTest {
 protected:
  void SetUp() override {
    IssueTest::SetUp();
    w_ = weight({48, 48}, 0.2), x_ = weight({24, 48});
    const FunctionUnits::Body body = [this](const at::Tensor& in) {
      if (throw_in_forward_) throw std::runtime_error("forward failed");
      return at::linear(in, w_).tanh() * in;
    };
    model_ = std::make_shared<FunctionUnits>(std::vector<FunctionUnits::Body>{body, body, body});
    plain_ = step();
    baseline_bytes_ = live_bytes();
  }
  void TearDown() override {
    model_.reset();
    w_.reset(), x_.reset();
    IssueTest::TearDown();
  }
  at::Tensor loss() { return model_->forward(x_).pow(2).sum(); }
  std::vector<at::Tensor> step() {
    return differentiate([this] { return loss(); }, {w_, x_});
  }
  // A step as it should be, and no byte left of anything before it.
  void expect_sane() {
    EXPECT_TRUE(bit_equal(step(), plain_));
    synchronize();
    EXPECT_EQ(live_bytes(), baseline_bytes_);
  }

  at::Tensor w_, x_;
  std::shared_ptr<FunctionUnits> model_;
  std::vector<at::Tensor> plain_;
  int64_t baseline_bytes_ = 0;
  bool throw_in_forward_ = false;
};

TEST_F(Lifecycle, ARetainedGraphRunsTwice) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  const auto value = loss();
  value.backward({}, /*retain_graph=*/true);
  value.backward();
  const auto twice = take_gradients(value, {w_, x_});
  for (size_t i = 1; i < twice.size(); ++i) EXPECT_TRUE(bit_equal(twice[i], plain_[i] * 2));
}

TEST_F(Lifecycle, DoubleBackwardIsTheSame) {
  const auto second_order = [&] {
    const auto value = loss();
    const auto first = torch::autograd::grad({value}, {w_, x_}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    (first[0].pow(2).sum() + first[1].pow(2).sum()).backward();
    return take_gradients(value, {w_, x_});
  };
  const auto plain = second_order();
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  EXPECT_TRUE(bit_equal(second_order(), plain));
}

TEST_F(Lifecycle, TwoPassesBeforeBackwardKeepApart) {
  const auto two = [&] {
    const auto first = loss(), second = model_->forward(x_ * 2).sum();
    (first + second).backward();
    return take_gradients(first, {w_, x_});
  };
  const auto apart = [&] {
    const auto first = loss(), second = model_->forward(x_ * 2).sum();
    first.backward();
    second.backward();
    return take_gradients(first, {w_, x_});
  };
  const auto plain_two = two(), plain_apart = apart();
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  EXPECT_TRUE(bit_equal(two(), plain_two));
  EXPECT_TRUE(bit_equal(apart(), plain_apart));
}

TEST_F(Lifecycle, TwoModelsInterleaveWithTheirOwnEngines) {
  FunctionUnits other({[this](const at::Tensor& in) { return at::linear(in, w_).sigmoid() * in; }});
  const auto both = [&] {
    const auto a = loss();
    const auto b = other.forward(x_).sum();
    b.backward();
    a.backward();
    return take_gradients(a, {w_, x_});
  };
  const auto plain = both();
  offload::Engine first(everything_leaves()), second(everything_leaves());
  first.attach(*model_);
  second.attach(other, {"layers.0"});
  EXPECT_TRUE(bit_equal(both(), plain));
  EXPECT_GT(first.take_step_report().offloaded_storages, 0);
  EXPECT_GT(second.take_step_report().offloaded_storages, 0);
}

TEST_F(Lifecycle, AnExceptionBetweenForwardAndBackwardIsForgotten) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(
        {
          const auto value = loss();
          throw std::runtime_error("loss failed");
        },
        std::runtime_error);
    expect_sane();
  }
}

TEST_F(Lifecycle, AnExceptionInForwardIsForgotten) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  throw_in_forward_ = true;
  EXPECT_THROW(loss(), std::runtime_error);
  throw_in_forward_ = false;
  expect_sane();
}

TEST_F(Lifecycle, AnExceptionInBackwardIsForgotten) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  {
    const auto middle = model_->run(0, x_);
    middle.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook failed"); });
    const auto value = model_->run(2, model_->run(1, middle)).sum();
    EXPECT_THROW(value.backward(), std::exception);
  }
  w_.mutable_grad().reset(), x_.mutable_grad().reset();
  expect_sane();
}

TEST_F(Lifecycle, APolicyThatThrowsMidwayFailsForwardAndNothingElse) {
  int asked = 0;
  auto options = everything_leaves();
  options.policy = [&](const at::Tensor&, std::string_view, std::string_view) {
    if (++asked == 3) throw std::runtime_error("policy failed");
    return offload::Decision::kOffload;
  };
  offload::Engine engine(options);
  engine.attach(*model_);
  EXPECT_THROW(loss(), std::runtime_error);
  expect_sane();
}

TEST_F(Lifecycle, OutOfMemoryMidwayIsForgotten) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  const auto room = control().memory(0).current;
  for (const int64_t spare : {6'000, 12'000, 24'000, 48'000}) {
    const auto config = control().config();
    configure([&](sim::DeviceConfig& c) { c.capacity = Bytes(room + spare); });
    try {
      step();
    } catch (const c10::OutOfMemoryError&) {
    }
    w_.mutable_grad().reset(), x_.mutable_grad().reset();
    synchronize();
    EXPECT_EQ(live_bytes(), baseline_bytes_) << spare;
    configure([&](sim::DeviceConfig& c) { c = config; });
    expect_sane();
  }
}

TEST_F(Lifecycle, AStepWithoutBackwardBetweenTwoStepsIsReleased) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  expect_sane();
  { const auto evaluation = loss(); }
  expect_sane();
}

TEST_F(Lifecycle, AFrozenBranchAndAnUnusedOutputAreReleased) {
  const auto frozen = weight({48, 48});
  frozen.set_requires_grad(false);
  const FunctionUnits::Body branchy = [&](const at::Tensor& in) {
    const auto unused = at::linear(in, w_).exp();
    return at::linear(in.detach(), frozen).tanh() + in * 2;
  };
  FunctionUnits model({branchy, branchy});
  const auto loss = [&] { return model.forward(x_).sum(); };
  const auto plain = differentiate(loss, {w_, x_});
  offload::Engine engine(everything_leaves());
  engine.attach(model);
  const int64_t before = live_bytes();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(bit_equal(differentiate(loss, {w_, x_}), plain));
  synchronize();
  EXPECT_EQ(live_bytes(), before);
}

TEST_F(Lifecycle, BackwardAfterTheEngineHasGoneWorks) {
  at::Tensor value;
  {
    offload::Engine engine(everything_leaves());
    engine.attach(*model_);
    value = loss();
  }
  value.backward();
  EXPECT_TRUE(bit_equal(take_gradients(value, {w_, x_}), plain_));
}

TEST_F(Lifecycle, MemoryIsFlatOverManyStepsSomeOfThemDropped) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  for (int i = 0; i < 3; ++i) step();
  const auto host = control().pinned_memory();
  for (int i = 0; i < 10; ++i) {
    const auto value = loss();
    if (i % 3 == 0) value.backward();
    w_.mutable_grad().reset(), x_.mutable_grad().reset();
  }
  expect_sane();
  EXPECT_EQ(control().pinned_memory().current, host.current);
}

TEST_F(Lifecycle, ForwardsWithoutGradientsLeaveNoTrace) {
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  for (int i = 0; i < 3; ++i) {
    const at::NoGradGuard no_grad;
    loss();
  }
  auto report = engine.take_step_report();
  EXPECT_EQ(report.saved_tensors, 0);
  EXPECT_EQ(report.offloaded_storages, 0);
  {
    const c10::InferenceMode inference;
    model_->forward(x_.detach());
  }
  expect_sane();
  EXPECT_GT(engine.take_step_report().offloaded_storages, 0);
}

TEST_F(Lifecycle, DetachLeavesTheModelAsItWas) {
  std::vector<std::string> names;
  for (const auto& item : model_->named_modules()) names.push_back(item.key());
  offload::Engine engine(everything_leaves());
  engine.attach(*model_);
  engine.detach();
  std::vector<std::string> after;
  for (const auto& item : model_->named_modules()) after.push_back(item.key());
  EXPECT_EQ(names, after);
  expect_sane();
  EXPECT_EQ(engine.take_step_report().saved_tensors, 0);
}

}  // namespace
}  // namespace neap::testing
