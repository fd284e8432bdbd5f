// Storage that others still own: VeOmni pull 965 (slices and padded aliases of storages that live on were resized
// away), fairscale 947 and ColossalAI 643 ("moved" activations that stayed), DeepSpeed 522 (identical memory, not a
// word).
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class SharedStorage : public IssueTest {};

TEST_F(SharedStorage, ASliceLeavesTheWholeIntact) {
  const auto w = weight({64, 64}), x = weight({32, 64});
  at::Tensor whole;
  const FunctionUnits::Body first = [&](const at::Tensor& in) {
    whole = at::linear(in, w);
    return whole.narrow(1, 0, 24).exp();  // the slice is less than half of its storage
  };
  const FunctionUnits::Body second = [&](const at::Tensor& in) { return in.sum() * whole.pow(2); };
  FunctionUnits model({first, second});
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto plain = differentiate(loss, {w, x});
  offload::Engine engine(everything_leaves());
  engine.attach(model);
  EXPECT_TRUE(bit_equal(differentiate(loss, {w, x}), plain));
  EXPECT_TRUE(bit_equal(whole.detach(), at::linear(x, w).detach()));
  whole.reset();
}

TEST_F(SharedStorage, APaddedAliasWithoutABaseIsOnlyCopied) {
  const auto x = weight({128});
  const auto padded = at::arange(160, at::kFloat).to(sim());
  FunctionUnits model({[&](const at::Tensor& in) { return in * padded.narrow(0, 0, 128).detach(); }});
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto plain = differentiate(loss, {x});
  offload::Engine engine(everything_leaves());
  engine.attach(model, {"layers.0"});
  EXPECT_TRUE(bit_equal(differentiate(loss, {x}), plain));
  EXPECT_TRUE(bit_equal(padded.cpu(), at::arange(160, at::kFloat)));
  EXPECT_EQ(padded.storage().nbytes(), 640U);
}

TEST_F(SharedStorage, TheDeviceReallyHoldsLess) {
  RotaryDecoder model({.layers = 8, .dim = 32, .sequence = 256}, sim());
  const auto peak_of_a_step = [&] {
    const int64_t before = live_bytes();
    control().reset_peak(0);
    model.loss(0).backward();
    const int64_t peak = control().memory(0).requested_peak - before;
    model.zero_grad();
    return peak;
  };
  peak_of_a_step();
  const int64_t plain = peak_of_a_step();
  auto options = everything_leaves();
  options.prefetch = offload::Layers{1};
  offload::Engine engine(options);
  engine.attach(model);
  const int64_t with = peak_of_a_step();
  const auto report = engine.take_step_report();
  EXPECT_LT(2 * with, plain) << to_string(report);
  EXPECT_GT(report.planned_drop, Bytes(0));
  EXPECT_GE(report.ratio(), 0.998) << to_string(report);
}

TEST_F(SharedStorage, WhatSomebodyElseKeepsIsReportedWithItsUnit) {
  const auto w = weight({128, 128}), x = weight({64, 128});
  std::vector<at::Tensor> hoard;
  const FunctionUnits::Body body = [&](const at::Tensor& in) {
    hoard.push_back(at::linear(in, w));
    return hoard.back().tanh() * hoard.back();
  };
  FunctionUnits model({body, body});
  offload::Engine engine(everything_leaves());
  engine.attach(model);
  model.forward(x).sum().backward();
  const auto report = engine.take_step_report();
  ASSERT_FALSE(report.still_referenced.empty());
  EXPECT_THAT(report.still_referenced.front().unit, HasSubstr("layers."));
  EXPECT_LT(report.ratio(), 0.95);
  EXPECT_FALSE(report.findings().empty());
  hoard.clear();
}

}  // namespace
}  // namespace neap::testing
