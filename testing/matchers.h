// Comparing tensors to the last bit, wherever they lie.
//
//   EXPECT_TRUE(bit_equal(grad_on, grad_off));
//   EXPECT_THAT(weights, BitEqual(expected));
#pragma once

#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace neap::testing {

// Same shape, dtype and bits; both or neither undefined. Unlike at::equal, equal NaNs are equal and 0.0 is not -0.0.
// A failure names the first element that differs and how many do.
::testing::AssertionResult bit_equal(const at::Tensor& a, const at::Tensor& b);
::testing::AssertionResult bit_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

MATCHER_P(BitEqual, expected, "is equal to the last bit") {
  const auto result = bit_equal(arg, expected);
  if (!result) *result_listener << result.message();
  return static_cast<bool>(result);
}

}  // namespace neap::testing
