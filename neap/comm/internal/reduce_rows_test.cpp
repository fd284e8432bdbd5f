#include "neap/comm/internal/reduce_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "testing/matchers.h"

namespace neap::comm::internal {
namespace {

using testing::bit_equal;

at::Tensor reduce(const std::vector<at::Tensor>& rows, const Reduction& reduction, at::ScalarType result) {
  const RowReduction how{rows[0].scalar_type(), result, reduction, static_cast<int>(rows.size())};
  how.check("test");
  std::vector<const std::byte*> data;
  for (const auto& row : rows) data.push_back(static_cast<const std::byte*>(row.const_data_ptr()));
  at::Tensor out = at::zeros({rows[0].numel()}, result);
  reduce_rows(how, data, static_cast<std::byte*>(out.mutable_data_ptr()), out.numel());
  return out;
}

// In bfloat16, 256 + 1 is 256: adding there would lose every small term.
TEST(ReduceRows, LowPrecisionIsAddedInFloat32AndRoundedOnce) {
  std::vector<at::Tensor> rows{at::full({3}, 256, at::kBFloat16)};
  for (int i = 0; i < 8; ++i) rows.push_back(at::full({3}, 1, at::kBFloat16));
  EXPECT_TRUE(bit_equal(reduce(rows, {}, at::kBFloat16), at::full({3}, 264, at::kBFloat16)));
  EXPECT_TRUE(bit_equal(reduce(rows, {}, at::kFloat), at::full({3}, 264, at::kFloat)));
}

TEST(ReduceRows, AddsFromTheFirstRowOn) {
  // 1e8 + 1 is 1e8 in float32, so the order shows.
  const std::vector<at::Tensor> up{at::full({1}, 1e8f), at::full({1}, 1.f), at::full({1}, -1e8f)};
  const std::vector<at::Tensor> down{up[0], up[2], up[1]};
  EXPECT_EQ(reduce(up, {}, at::kFloat).item<float>(), 0);
  EXPECT_EQ(reduce(down, {}, at::kFloat).item<float>(), 1);
}

TEST(ReduceRows, AFloat64ResultIsAddedInFloat64) {
  const std::vector<at::Tensor> rows{at::full({1}, 1e8f), at::full({1}, 1.f)};
  EXPECT_EQ(reduce(rows, {}, at::kDouble).item<double>(), 100'000'001);
}

TEST(ReduceRows, TheAverageIsADivisionAndTheFactorComesAfterIt) {
  const std::vector<at::Tensor> rows{at::randn({5000}), at::randn({5000}), at::randn({5000})};
  const at::Tensor sum = rows[0] + rows[1] + rows[2];
  EXPECT_TRUE(bit_equal(reduce(rows, {.op = ReduceOp::kAverage}, at::kFloat), sum / 3));
  EXPECT_TRUE(bit_equal(reduce(rows, {.op = ReduceOp::kAverage, .factor = 0.1}, at::kFloat), sum / 3 * 0.1));
  EXPECT_TRUE(bit_equal(reduce(rows, {.factor = 0.1}, at::kFloat), sum * 0.1));
}

TEST(ReduceRows, AMaximumShowsNotANumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<at::Tensor> rows{at::tensor({1.f, nan, 3.f}), at::tensor({2.f, 1.f, nan}),
                                     at::tensor({-1.f, 0.f, 0.f})};
  const at::Tensor out = reduce(rows, {.op = ReduceOp::kMax}, at::kFloat);
  EXPECT_EQ(out[0].item<float>(), 2);
  EXPECT_TRUE(std::isnan(out[1].item<float>()));
  EXPECT_TRUE(std::isnan(out[2].item<float>()));
}

TEST(ReduceRows, IntegersAreExactAndWrap) {
  const int64_t big = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(reduce({at::full({1}, big, at::kLong), at::full({1}, 1, at::kLong)}, {}, at::kLong).item<int64_t>(),
            std::numeric_limits<int64_t>::min());
  EXPECT_EQ(reduce({at::full({1}, 7, at::kInt), at::full({1}, -9, at::kInt)}, {}, at::kInt).item<int>(), -2);
}

TEST(ReduceRows, TheResultMayBeOneOfTheRows) {
  const std::vector<at::Tensor> rows{at::randn({5000}), at::randn({5000}), at::randn({5000})};
  const at::Tensor expected = rows[0] + rows[1] + rows[2];
  for (size_t into = 0; into < rows.size(); ++into) {
    std::vector<at::Tensor> copies;
    std::vector<const std::byte*> data;
    for (const auto& row : rows) {
      copies.push_back(row.clone());
      data.push_back(static_cast<const std::byte*>(copies.back().const_data_ptr()));
    }
    const RowReduction how{at::kFloat, at::kFloat, {}, 3};
    reduce_rows(how, data, static_cast<std::byte*>(copies[into].mutable_data_ptr()), 5000);
    EXPECT_TRUE(bit_equal(copies[into], expected));
  }
}

}  // namespace
}  // namespace neap::comm::internal
