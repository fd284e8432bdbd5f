// Units of a model that run again: choosing them, what they report, and what they leave when they go.
#include "neap/recompute/recompute.h"

#include <algorithm>
#include <memory>

#include "neap/autograd/event_log_hook.h"
#include "neap/autograd/named_hook_points.h"
#include "neap/base/error.h"
#include "neap/recompute/test_support.h"
#include "neap/trace/recorder.h"
#include "testing/small_models.h"

namespace neap::recompute::testing {
namespace {

using neap::testing::FunctionUnits;
using neap::testing::HostileModel;
using neap::testing::RotaryDecoder;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Units : public ::testing::Test {
 protected:
  Units() {
    w = at::randn({8, 8}).set_requires_grad(true), x = at::randn({4, 8}).set_requires_grad(true);
    const FunctionUnits::Body body = [this](const Tensor& in) {
      ++runs;
      return at::dropout(at::linear(in, w).tanh() * in, 0.2, true);
    };
    model = std::make_shared<FunctionUnits>(std::vector<FunctionUnits::Body>{body, body, body}, TensorList{w});
    plain = step();
    runs = 0;
  }
  Tensor loss() {
    at::manual_seed(4);
    return model->forward(x).pow(2).sum();
  }
  TensorList step() {
    loss().backward();
    return take();
  }
  TensorList take() { return {std::exchange(x.mutable_grad(), Tensor()), std::exchange(w.mutable_grad(), Tensor())}; }

  Tensor w, x;
  std::shared_ptr<FunctionUnits> model;
  TensorList plain;
  int runs = 0;
};

TEST_F(Units, RunAgainInBackward) {
  Recompute recompute;
  recompute.attach(*model);
  EXPECT_THAT(recompute.unit_names(), ElementsAre("layers.0", "layers.1", "layers.2"));
  EXPECT_TRUE(bit_equal(step(), plain));
  EXPECT_EQ(runs, 6);
}

TEST_F(Units, AreChosenByIndexAndByPattern) {
  Recompute recompute;
  recompute.attach(*model, {"2"});
  recompute.attach(*model, {"layers.{*}", "0"});
  EXPECT_THAT(recompute.unit_names(), ElementsAre("layers.0", "layers.1", "layers.2"));
  recompute.detach();
  recompute.attach(*model, {"1-2"});
  EXPECT_TRUE(bit_equal(step(), plain));
  EXPECT_EQ(runs, 5);
}

TEST_F(Units, PatternsThatMatchNothingAttachNothing) {
  Recompute recompute;
  EXPECT_THAT(error_of([&] {
                recompute.attach(*model, {"0", "layers.{*}.mlp"});
              }),
              HasSubstr("[recompute.modules] pattern 'layers.{*}.mlp' matches no module"));
  EXPECT_THAT(error_of([&] { recompute.attach(*model, {"0-3"}); }),
              HasSubstr("[recompute.layers] expected indices from 0 to 2; found '0-3'"));
  EXPECT_THAT(recompute.unit_names(), IsEmpty());
  FunctionUnits other({[](const Tensor& in) { return in; }});
  recompute.attach(*model);
  EXPECT_THROW(recompute.attach(other), UserError);
}

TEST_F(Units, ReportWhatTheyDid) {
  Recompute recompute;
  recompute.attach(*model);
  step();
  StepReport report = recompute.take_step_report();
  EXPECT_EQ(report.regions, 3);
  EXPECT_EQ(report.reruns, 3);
  // linear saves input and weight, tanh its result, mul both factors, dropout its mask: 6 a unit.
  EXPECT_EQ(report.saved_tensors, 3 * 6);
  // Of these, tanh's result and the mask are nobody else's: 4 x 8 floats each, or bytes where the mask is boolean.
  const Tensor mask_like = at::empty({4, 8});
  EXPECT_EQ(report.bytes_not_kept.count, 3 * 2 * static_cast<int64_t>(mask_like.nbytes()));
  EXPECT_THAT(report.idle_units, IsEmpty());
  EXPECT_THAT(report.findings(), IsEmpty());

  { const Tensor y = model->run(1, x); }
  report = recompute.take_step_report();
  EXPECT_EQ(report.regions, 1);
  EXPECT_EQ(report.reruns, 0);
  EXPECT_THAT(report.idle_units, ElementsAre("layers.0", "layers.2"));
  EXPECT_THAT(report.findings(), ElementsAre(HasSubstr("2 chosen units, layers.0 first: no forward pass")));
  EXPECT_EQ(recompute.take_step_report().regions, 0);
}

TEST_F(Units, SaySoWhenThereIsNothingToGain) {
  FunctionUnits linear({[this](const Tensor& in) { return at::linear(in, w); }}, {w});
  Recompute recompute;
  recompute.attach(linear, {"layers.0"});
  linear.forward(x).sum().backward();
  EXPECT_THAT(recompute.take_step_report().findings(), ElementsAre(HasSubstr("frees no memory")));
}

TEST_F(Units, AreDrawnInTheTrace) {
  trace::Recorder recorder;
  Recompute recompute({}, &recorder);
  recompute.attach(*model, {"1"});
  step();
  EXPECT_EQ(recorder.snapshot().find("recompute/second runs", "layers.1").size(), 1U);
}

TEST_F(Units, NameThemselvesInDebugMode) {
  FunctionUnits model2({[this](const Tensor& in) { return (in * ++runs).exp(); }});
  Recompute recompute({.debug = true});
  recompute.attach(model2, {"layers.0"});
  const Tensor y = model2.forward(x).sum();
  EXPECT_THAT(error_of([&] { y.backward(); }), HasSubstr("[recompute] unit 'layers.0': expected saved tensor"));
}

TEST_F(Units, WithoutGradientsAreLeftAlone) {
  Recompute recompute;
  recompute.attach(*model);
  {
    const at::NoGradGuard no_grad;
    loss();
  }
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(recompute.take_step_report().regions, 0);
}

TEST_F(Units, BackwardWorksAfterDetachingAndAfterTheEnd) {
  trace::Recorder recorder;
  Tensor y;
  {
    Recompute recompute({}, &recorder);
    recompute.attach(*model);
    y = loss();
    recompute.detach();
    EXPECT_TRUE(bit_equal(step(), plain));
    EXPECT_EQ(runs, 6);  // nothing is recomputed any more
  }
  y.backward();
  EXPECT_TRUE(bit_equal(take(), plain));
  EXPECT_EQ(runs, 9);
}

TEST_F(Units, SayWhenTheirModuleIsGone) {
  Recompute recompute;
  recompute.attach(*model);
  const Tensor y = loss();
  model.reset();
  EXPECT_THAT(error_of([&] { y.backward(); }), HasSubstr("keep the model until backward is done"));
}

struct OldStyle : torch::nn::Module, autograd::Hookable {
  Tensor forward(const Tensor& x) {
    return hook_point().run({x}, [&] { return x.exp(); });
  }
};

TEST_F(Units, RefuseABodyThatCannotRunAgain) {
  struct Root : torch::nn::Module {
    using torch::nn::Module::register_module;
  } root;
  const auto unit = root.register_module("block", std::make_shared<OldStyle>());
  Recompute recompute;
  recompute.attach(root, {"block"});
  EXPECT_THAT(error_of([&] { unit->forward(x); }),
              HasSubstr("[recompute] unit 'block': expected a body that can run again"));
}

TEST_F(Units, HooksOfUnitsWithinRunOncePerPass) {
  // An outer unit that runs inner ones: the inner hooks see the second run's forward, but one backward.
  std::vector<std::string> events;
  FunctionUnits inner({[](const Tensor& in) { return in.exp().sin(); }});
  FunctionUnits outer({[&](const Tensor& in) { return inner.run(0, in * 2).cos(); }});
  Recompute recompute;
  recompute.attach(outer, {"layers.0"});
  const auto log = std::make_shared<autograd::testing::EventLogHook>(events, "inner");
  const auto point = autograd::find_hookables(inner).at(0).point;
  const autograd::HookHandle handle = point->attach(log, autograd::HookOrder::kShard);
  outer.forward(x).sum().backward();
  EXPECT_THAT(events, ElementsAre("inner >", "inner <", "inner >", "inner <", "inner before", "inner after"));
}

TEST(UnitsOfModels, TrainAlikeWithAndWithoutOnTheCpu) {
  const auto rotary = [](bool recomputed, neap::testing::Handing handing) {
    RotaryDecoder model({.layers = 4}, c10::kCPU, handing);
    Recompute recompute;
    if (recomputed) recompute.attach(model);
    return neap::testing::train(
        model, [&](int64_t step) { return model.loss(step); }, 4);
  };
  for (const auto handing : {neap::testing::Handing::kPositional, neap::testing::Handing::kKeyword}) {
    EXPECT_TRUE(neap::testing::bit_equal(rotary(true, handing), rotary(false, handing)));
  }
  const auto hostile = [](bool recomputed) {
    HostileModel model(3, at::TensorOptions().dtype(at::kFloat));
    Recompute recompute({.debug = true});
    if (recomputed) recompute.attach(model);
    return neap::testing::train(
        model, [&](int64_t step) { return model.loss(step); }, 4);
  };
  EXPECT_TRUE(neap::testing::bit_equal(hostile(true), hostile(false)));
}

}  // namespace
}  // namespace neap::recompute::testing
