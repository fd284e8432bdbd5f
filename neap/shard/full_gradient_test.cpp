#include "neap/shard/full_gradient.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "testing/matchers.h"

namespace neap::shard {
namespace {

using testing::bit_equal;

// Of parameters of [4, 6], one after another.
FullGradient of(int64_t parameters, std::optional<c10::ScalarType> narrow = {}) {
  FullGradient gradient(24 * parameters, at::kFloat, narrow, at::kCPU, "no gradients");
  for (int64_t i = 0; i < parameters; ++i) gradient.add_view(24 * i, {4, 6}, {6, 1});
  return gradient;
}

TEST(FullGradient, OfALoneParameterInOnePassIsWhatAutogradBrought) {
  FullGradient gradient = of(1);
  gradient.open(/*single_pass=*/true);
  EXPECT_FALSE(gradient.target(0).defined());
  EXPECT_EQ(gradient.bytes(), Bytes(0));
  at::Tensor brought = at::randn({4, 6});
  const void* memory = brought.data_ptr();
  EXPECT_EQ(gradient.take_in(0, brought), Bytes(0));
  EXPECT_EQ(gradient.flat().data_ptr(), memory);
  EXPECT_EQ(brought.data_ptr(), memory);
  EXPECT_EQ(gradient.bytes(), Bytes(24 * 4));
  gradient.release();
  EXPECT_FALSE(gradient.exists());
}

TEST(FullGradient, TakesNothingThatIsLaidOutOtherwiseOrAPartOfMore) {
  const at::Tensor values = at::randn({4, 6});
  const at::Tensor around = at::zeros({8, 6});
  around.narrow(0, 4, 4).copy_(values);
  for (at::Tensor brought : {values.t().contiguous().t(), around.narrow(0, 4, 4), values.to(at::kDouble)}) {
    FullGradient gradient = of(1);
    gradient.open(/*single_pass=*/true);
    EXPECT_EQ(gradient.take_in(0, brought), Bytes(24 * 4));
    EXPECT_TRUE(bit_equal(gradient.flat().view({4, 6}), values));
    EXPECT_TRUE(brought.is_alias_of(gradient.flat())) << "what comes next is added in place";
  }
}

TEST(FullGradient, IsZeroWhereNothingCame) {
  for (const int64_t parameters : {1, 2}) {
    FullGradient gradient = of(parameters);
    gradient.open(/*single_pass=*/true);
    EXPECT_TRUE(bit_equal(gradient.flat(), at::zeros({24 * parameters}).neg()));
  }
}

TEST(FullGradient, OfSeveralParametersIsAccumulatedInPlace) {
  FullGradient gradient = of(2);
  gradient.open(/*single_pass=*/true);
  const at::Tensor values = at::randn({4, 6});
  at::Tensor target = gradient.target(1);
  target.add_(values);
  EXPECT_EQ(gradient.take_in(1, target), Bytes(0));
  EXPECT_TRUE(bit_equal(gradient.flat().narrow(0, 24, 24).view({4, 6}), values));
}

TEST(FullGradient, IsNarrowInOnePassAlone) {
  FullGradient gradient = of(2, at::kBFloat16);
  gradient.open(/*single_pass=*/true);
  EXPECT_EQ(gradient.target(0).scalar_type(), at::kBFloat16);
  EXPECT_EQ(gradient.bytes(), Bytes(2 * 24 * 2));
  gradient.release();
  gradient.open(/*single_pass=*/false);
  EXPECT_EQ(gradient.target(0).scalar_type(), at::kFloat);
  EXPECT_EQ(gradient.bytes(), Bytes(2 * 24 * 4));
}

}  // namespace
}  // namespace neap::shard
