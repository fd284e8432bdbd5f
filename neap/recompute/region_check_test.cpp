// What cannot be run again is noticed, and the message says which tensor of which unit and why.
#include <c10/util/Exception.h>

#include <memory>

#include "neap/base/error.h"
#include "neap/recompute/test_support.h"

namespace neap::recompute::testing {
namespace {

using ::testing::AllOf;

// Backward over a region whose second run takes another way than its first.
std::string error_when_other(const std::function<Tensor(const Tensor& x, bool again)>& body,
                             const Options& options = {}) {
  auto runs = std::make_shared<int>(0);
  const Tensor x = at::ones({4, 2}).set_requires_grad(true);
  RegionOptions region_options{options, "model.layers.3", {}};
  const Tensor y = region_of([=](const Tensor& in) { return body(in, (*runs)++ > 0); }, x, region_options);
  const std::string error = error_of([&] { y.sum().backward(); });
  EXPECT_EQ(autograd::SavedTensorScope::current(), nullptr);
  return error;
}

TEST(RegionCheck, FewerTensors) {
  EXPECT_THAT(error_when_other([](const Tensor& x, bool again) { return again ? x.sin() : x.sin().cos(); }),
              AllOf(HasSubstr("[recompute] unit 'model.layers.3': expected its second run to save 2 tensors"),
                    HasSubstr("found 1; usual cause: something that decides which way the unit goes")));
}

TEST(RegionCheck, MoreTensorsAreSeenWhenTheRunGoesToItsEnd) {
  const auto body = [](const Tensor& x, bool again) { return again ? x.sin().cos() : x.sin(); };
  EXPECT_THAT(error_when_other(body, {.early_stop = false}), HasSubstr("to save 1 tensors, as the first did; found 2"));
  EXPECT_EQ(error_when_other(body), "no error");  // what early stop never gets to see cannot hurt either
}

TEST(RegionCheck, AnotherShape) {
  EXPECT_THAT(
      error_when_other([](const Tensor& x, bool again) { return (again ? x.narrow(0, 0, 3) : x).exp().sin().sum(); }),
      AllOf(HasSubstr("unit 'model.layers.3': expected saved tensor 1 of 2 to be computed again as it was: CPU Float "
                      "[4, 2]; found another shape: CPUFloatType [3, 2]"),
            HasSubstr("usual cause: a shape that depends on values"), HasSubstr("debug mode names")));
}

TEST(RegionCheck, AnotherDtype) {
  EXPECT_THAT(error_when_other([](const Tensor& x, bool again) { return (again ? x.to(at::kDouble) : x).exp(); }),
              AllOf(HasSubstr("CPU Float [4, 2]; found another type: CPUDoubleType [4, 2]"),
                    HasSubstr("usual cause: a dtype or a device")));
}

TEST(RegionCheck, OtherValuesAreNamedInDebugMode) {
  const auto body = [](const Tensor& x, bool again) { return ((x.exp() + (again ? 1 : 0)).sin() * x).tanh(); };
  EXPECT_EQ(error_when_other(body), "no error");
  EXPECT_THAT(error_when_other(body, {.debug = true}),
              AllOf(HasSubstr("unit 'model.layers.3': expected saved tensor 2 of 5, saved by aten::sin, to be computed "
                              "again as it was: CPU Float [4, 2]; found other values"),
                    HasSubstr("usual cause: random numbers that do not come from torch's default generators")));
}

TEST(RegionCheck, DebugModeFindsWhatEarlyStopHides) {
  EXPECT_THAT(
      error_when_other([](const Tensor& x, bool again) { return again ? x.sin().cos() : x.sin(); }, {.debug = true}),
      HasSubstr("found 2"));
}

TEST(RegionCheck, DebugModeIsSilentWhereAllIsWell) {
  Net net;
  const TensorList plain = net.gradients_of(net.loss(Way::kPlain));
  for (const Way way : {Way::kRegions, Way::kNested}) {
    EXPECT_TRUE(bit_equal(net.gradients_of(net.loss(way, {{.debug = true}})), plain));
  }
}

TEST(RegionCheck, EqualNansAreEqual) {
  EXPECT_EQ(error_when_other([](const Tensor& x, bool) { return (x - 2).sqrt().exp(); }, {.debug = true}), "no error");
}

TEST(RegionCheck, RandomNumbersOfAnotherGeneratorAreFoundOut) {
  auto own = at::globalContext().defaultGenerator(at::kCPU).clone();
  const auto body = [own](const Tensor& x, bool) { return x * at::bernoulli(x.detach() * 0.5, own); };
  EXPECT_THAT(error_when_other(body, {.debug = true}), HasSubstr("saved by aten::mul"));
}

TEST(RegionCheck, AnInputChangedAfterForwardIsCaughtAsInEager) {
  const Tensor x = at::ones({3}).set_requires_grad(true);
  for (const bool recomputed : {false, true}) {
    const Tensor h = x * 2;
    const auto body = [](const Tensor& in) { return in.sin(); };
    const Tensor y = recomputed ? region_of(body, h) : body(h);
    h.detach().add_(1);
    EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("is at version 1; expected version 0")) << recomputed;
  }
}

TEST(RegionCheck, AnInputChangedInsideIsCaughtAsInEager) {
  const Tensor x = at::ones({3}).set_requires_grad(true);
  const Tensor y = region_of(
      [](const Tensor& in) {
        const Tensor out = in.sin();
        in.detach().add_(1);
        return out;
      },
      x * 2);
  EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(RegionCheck, ATensorInsideChangedInPlaceIsCaughtAsInEager) {
  const Tensor x = at::ones({3}).set_requires_grad(true);
  const auto body = [](const Tensor& in) {
    const Tensor z = in.exp();
    const Tensor out = (z * 2).sin() + z.cos();
    z.detach().add_(1);
    return out;
  };
  for (const bool recomputed : {false, true}) {
    const Tensor y = recomputed ? region_of(body, x) : body(x);
    EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation")) << recomputed;
  }
}

TEST(RegionCheck, AnOutputThatBackwardNeedsAndSomebodyChangedIsCaughtAsInEager) {
  const Tensor x = at::ones({3}).set_requires_grad(true);
  for (const bool recomputed : {false, true}) {
    const auto body = [](const Tensor& in) { return in.sigmoid(); };
    const Tensor y = recomputed ? region_of(body, x) : body(x);
    const Tensor z = y * 1;
    y.detach().zero_();
    EXPECT_THAT(error_of([&] { z.sum().backward(); }), HasSubstr("modified by an inplace operation")) << recomputed;
  }
}

TEST(RegionCheck, AParameterChangedAfterForwardIsCaughtAsInEager) {
  const Tensor w = at::ones({3}).set_requires_grad(true), x = at::ones({3}).set_requires_grad(true);
  for (const bool recomputed : {false, true}) {
    const auto body = [w](const Tensor& in) { return in * w; };
    const Tensor y = recomputed ? region_of(body, x) : body(x);
    w.detach().mul_(0.9);  // an optimizer between forward and backward
    EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation")) << recomputed;
  }
}

TEST(RegionCheck, InPlaceWorkOnTensorsOfTheRegionIsFine) {
  const auto run = [](bool recomputed) {
    const Tensor x = at::full({3}, 0.5).set_requires_grad(true);
    const auto body = [](const Tensor& in) { return (in * 2).add_(1).exp_() * in; };
    (recomputed ? region_of(body, x) : body(x)).sum().backward();
    return TensorList{x.grad()};
  };
  EXPECT_TRUE(bit_equal(run(true), run(false)));
}

TEST(RegionCheck, CodeThatSwallowsTheEarlyStopChangesNothing) {
  const Tensor x = at::ones({3}).set_requires_grad(true);
  int swallowed = 0;
  const Tensor y = region_of(
      [&](const Tensor& in) {
        Tensor out = in;
        for (int i = 0; i < 3; ++i) {
          try {
            out = out.sin();
          } catch (...) {
            ++swallowed;
          }
        }
        return out;
      },
      x);
  y.sum().backward();
  EXPECT_EQ(swallowed, 1);
  EXPECT_TRUE(at::allclose(x.grad(), x.cos() * x.sin().cos() * x.sin().sin().cos()));
}

TEST(RegionCheck, RefusesAMissingFunction) { EXPECT_THROW(region(nullptr, {at::ones({1})}), UserError); }

}  // namespace
}  // namespace neap::recompute::testing
