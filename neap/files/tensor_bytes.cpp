#include "neap/files/tensor_bytes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>

#include "neap/base/error.h"

namespace neap::files {
namespace {

constexpr std::pair<SafeType, at::ScalarType> kTypes[] = {
    {SafeType::kBool, at::kBool},  {SafeType::kU8, at::kByte},       {SafeType::kI8, at::kChar},
    {SafeType::kI16, at::kShort},  {SafeType::kI32, at::kInt},       {SafeType::kI64, at::kLong},
    {SafeType::kF16, at::kHalf},   {SafeType::kBF16, at::kBFloat16}, {SafeType::kF32, at::kFloat},
    {SafeType::kF64, at::kDouble},
};

}  // namespace

at::ScalarType to_torch(SafeType type) {
  return std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& pair) { return pair.first == type; })
      ->second;
}

SafeType to_safe(at::ScalarType type) {
  const auto* found =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& pair) { return pair.second == type; });
  NEAP_CHECK(found != std::end(kTypes), "[files] safetensors cannot hold tensors of ", type);
  return found->first;
}

at::Tensor tensor_over(std::span<const std::byte> bytes, SafeType type, at::IntArrayRef sizes) {
  NEAP_ASSERT(std::cmp_equal(c10::multiply_integers(sizes) * size_of(type), bytes.size()));
  const at::TensorOptions options(to_torch(type));
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (address % static_cast<std::size_t>(size_of(type)) == 0) {
    return at::from_blob(const_cast<std::byte*>(bytes.data()), sizes, options);
  }
  at::Tensor copy = at::empty(sizes, options);
  std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  return copy;
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  NEAP_ASSERT(tensor.is_contiguous() && tensor.is_cpu());
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace neap::files
