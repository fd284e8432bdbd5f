// Recomputation meets offload. torchtune 1867 (an unpacked tensor was let go while it was in use: NaN gradients with
// masked indexing in a checkpointed block), torchtune pulls 1913 and 1936 (the second run saves a view of an unpacked
// tensor), DeepSpeed pull 8148 (frozen parameters taken for activations), DeepSpeed 522 (checkpointing that changes no
// number of the memory report), PyTorch 133550 (meta tensors).
#include <ATen/core/grad_mode.h>

#include "neap/recompute/recompute.h"
#include "neap/recompute/region.h"
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class RecomputeAndOffload : public IssueTest {
 protected:
  // Losses and gradients of three steps of two units with `body`.
  struct Way {
    bool offloaded = false;
    bool recomputed = false;
    double gbps = 0;
  };
  std::vector<at::Tensor> run(const FunctionUnits::Body& body, const std::vector<at::Tensor>& leaves, const Way& way) {
    FunctionUnits model({body, body});
    offload::Engine engine(everything_leaves());
    recompute::Recompute recompute;
    if (way.offloaded) engine.attach(model);
    if (way.recomputed) recompute.attach(model);
    std::vector<at::Tensor> all;
    for (int step = 0; step < 3; ++step) {
      for (at::Tensor& tensor : differentiate([&] { return model.forward(leaves[0]).pow(2).sum(); }, leaves)) {
        all.push_back(std::move(tensor));
      }
    }
    EXPECT_EQ(engine.take_step_report().offloaded_storages > 0, way.offloaded);
    EXPECT_EQ(recompute.take_step_report().reruns, way.recomputed ? 3 * 2 : 0);
    return all;
  }
  void expect_alike(const FunctionUnits::Body& body, const std::vector<at::Tensor>& leaves) {
    const auto plain = run(body, leaves, {});
    for (const at::Tensor& tensor : plain) EXPECT_TRUE(tensor.isfinite().all().item<bool>());
    EXPECT_TRUE(bit_equal(run(body, leaves, {.recomputed = true}), plain));
    EXPECT_TRUE(bit_equal(run(body, leaves, {.offloaded = true, .recomputed = true}), plain));
    throttle_copies(0.05, 0.05);
    EXPECT_TRUE(bit_equal(run(body, leaves, {.offloaded = true, .recomputed = true}), plain));
  }
};

TEST_F(RecomputeAndOffload, MaskedIndexingInABlockThatRunsAgain) {
  const auto x = weight({32, 16}), w = weight({16, 16}, 0.3);
  expect_alike(
      [w](const at::Tensor& in) {
        const auto h = at::linear(in, w);
        const auto rows = at::arange(32, at::TensorOptions(sim()).dtype(at::kLong)).remainder(3).ne(0);
        const auto picked = h.index({rows}).tanh();
        return in + h.index_put({rows}, picked * picked);
      },
      {x, w});
}

TEST_F(RecomputeAndOffload, TheSecondRunSavesViewsOfWhatCameBack) {
  const auto x = weight({32, 16}), w = weight({16, 16}, 0.3);
  expect_alike(
      [w](const at::Tensor& in) {
        const auto flat = in.view({-1});
        const auto turned = in.t();
        return at::linear(in, w).tanh() + (flat * flat).view({32, 16}) + turned.sin().t() * in.narrow(1, 0, 1);
      },
      {x, w});
}

TEST_F(RecomputeAndOffload, FrozenParametersAreNoActivations) {
  // Half of it frozen, as with LoRA; neither half changes shape, moves, or is counted.
  const auto x = weight({32, 16}), a = weight({4, 16}), b = weight({16, 4});
  const auto frozen = weight({16, 16}, 0.3).detach();
  const auto body = [=](const at::Tensor& in) {
    return at::linear(in, frozen).tanh() + at::linear(at::linear(in, a), b);
  };
  expect_alike(body, {x, a, b});
  FunctionUnits model({body}, {frozen, a, b});
  recompute::Recompute recompute({.debug = true});
  recompute.attach(model, {"layers.0"});
  model.forward(x.detach()).sum().backward();
  const auto report = recompute.take_step_report();
  EXPECT_EQ(report.reruns, 1);
  EXPECT_EQ(report.bytes_not_kept.count, (32 * 16 + 32 * 4) * 4);  // tanh's result, and between the two small ones
}

TEST_F(RecomputeAndOffload, ACaseWithoutEffectIsReported) {
  const auto x = weight({32, 16}), w = weight({16, 16});
  FunctionUnits model({[w](const at::Tensor& in) { return at::linear(in, w); }}, {w});
  recompute::Recompute recompute;
  recompute.attach(model, {"layers.0"});
  model.forward(x).sum().backward();
  EXPECT_THAT(recompute.take_step_report().findings(), ::testing::ElementsAre(HasSubstr("frees no memory")));
}

TEST_F(RecomputeAndOffload, EveryKindOfPassOverBoth) {
  const auto x = weight({24, 16}), w = weight({16, 16}, 0.3);
  const FunctionUnits::Body body = [w](const at::Tensor& in) { return at::linear(in, w).tanh() * in; };
  const auto model = std::make_shared<FunctionUnits>(std::vector<FunctionUnits::Body>{body, body, body});
  const auto loss = [&] { return model->forward(x).pow(2).sum(); };
  const auto plain = differentiate(loss, {x, w});
  offload::Engine engine(everything_leaves());
  engine.attach(*model);
  recompute::Recompute recompute;
  recompute.attach(*model);
  synchronize();
  const int64_t level = live_bytes();
  {
    const auto value = loss();
    value.backward({}, /*retain_graph=*/true);
    value.backward();
    const auto twice = take_gradients(value, {x, w});
    for (size_t i = 1; i < twice.size(); ++i) EXPECT_TRUE(bit_equal(twice[i], plain[i] * 2));
  }
  { const auto dropped = loss(); }
  {
    const auto middle = model->run(0, x);
    middle.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook failed"); });
    const auto value = model->run(2, model->run(1, middle)).sum();
    EXPECT_THROW(value.backward(), std::exception);
    x.mutable_grad().reset(), w.mutable_grad().reset();
  }
  {
    const auto first = loss(), second = loss();  // two passes before backward
    second.backward();
    EXPECT_TRUE(bit_equal(take_gradients(second, {x, w}), plain));
    first.backward();
    EXPECT_TRUE(bit_equal(take_gradients(first, {x, w}), plain));
  }
  synchronize();
  EXPECT_EQ(live_bytes(), level);
  at::Tensor value;
  {
    const auto orphan = loss();
    engine.detach(), recompute.detach();
    value = orphan;
  }
  value.backward();  // after both have gone
  EXPECT_TRUE(bit_equal(take_gradients(value, {x, w}), plain));
}

TEST_F(RecomputeAndOffload, MetaTensorsPlanWithoutMemory) {
  const auto x = at::empty({8, 16}, at::kMeta).set_requires_grad(true);
  const auto w = at::empty({16, 16}, at::kMeta).set_requires_grad(true);
  const auto body = [w](at::ArrayRef<at::Tensor> in) -> recompute::TensorList { return {at::linear(in[0], w).tanh()}; };
  recompute::region(body, {x})[0].sum().backward();
  EXPECT_EQ(w.grad().sizes(), w.sizes());

  FunctionUnits model({[w](const at::Tensor& in) { return at::linear(in, w).tanh(); }});
  offload::Engine engine(everything_leaves());
  engine.attach(model);
  model.forward(x).sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(engine.take_step_report().offloaded_storages, 0);
}

}  // namespace
}  // namespace neap::testing
