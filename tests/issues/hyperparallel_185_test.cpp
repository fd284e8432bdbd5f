// HyperParallel issue 185: several views of one storage were copied out and back one by one.
// TRL (found in its source): a tensor saved by several operators kept its device storage alive, so nothing was saved.
#include "tests/issues/issue_test.h"

namespace neap::testing {
namespace {

class HyperParallel185 : public IssueTest {};

constexpr int64_t kRows = 64, kWidth = 32;

TEST_F(HyperParallel185, ThreeViewsOfOneProjectionAreOneTransfer) {
  const auto w = weight({3 * kWidth, kWidth}), x = weight({kRows, kWidth});
  FunctionUnits model({[&](const at::Tensor& in) {
    const auto qkv = at::linear(in, w).chunk(3, -1);
    return qkv[0] * qkv[1] + qkv[1] * qkv[2];
  }});
  const auto loss = [&] { return model.forward(x).pow(2).sum(); };
  const auto plain = differentiate(loss, {w, x});

  offload::Engine engine(everything_leaves());
  engine.attach(model, {"layers.0"});
  control().reset_counters(0);
  const auto value = loss();
  value.backward();
  synchronize();
  const auto moved = control().counters(0);
  EXPECT_TRUE(bit_equal(take_gradients(value, {w, x}), plain));
  const Bytes projection(kRows * 3 * kWidth * 4);
  EXPECT_EQ(moved.d2h.bytes, projection.count);
  EXPECT_EQ(moved.h2d.bytes, projection.count);
  const auto report = engine.take_step_report();
  EXPECT_EQ(report.saved_bytes, projection);
  EXPECT_EQ(report.offloaded_storages, 1);
  EXPECT_EQ(report.offloaded_bytes, projection);
  EXPECT_EQ(report.reloaded_storages, 1);
  EXPECT_EQ(report.reloaded_bytes, projection);
}

TEST_F(HyperParallel185, ATensorSavedByThreeOperatorsLeavesOnce) {
  const auto q = weight({kWidth, kWidth}), k = weight({kWidth, kWidth}), v = weight({kWidth, kWidth});
  const auto x = weight({kRows, kWidth});
  FunctionUnits model({[&](const at::Tensor& in) {
    const auto h = in.tanh();  // saved by tanh itself and by three matrix products
    return at::matmul(h, q) + at::matmul(h, k) + at::matmul(h, v);
  }});
  const auto loss = [&] { return model.forward(x).sum(); };
  const auto plain = differentiate(loss, {q, k, v, x});

  offload::Engine engine(everything_leaves());
  engine.attach(model, {"layers.0"});
  const int64_t before = live_bytes();
  const auto value = loss();
  synchronize();
  EXPECT_LE(live_bytes() - before, 512);  // the loss alone: h has gone
  value.backward();
  EXPECT_TRUE(bit_equal(take_gradients(value, {q, k, v, x}), plain));
  const auto report = engine.take_step_report();
  EXPECT_EQ(report.offloaded_bytes, Bytes(kRows * kWidth * 4));
  EXPECT_EQ(report.reloaded_bytes, Bytes(kRows * kWidth * 4));
}

}  // namespace
}  // namespace neap::testing
