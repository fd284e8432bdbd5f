// What makes a tensor of bytes: everything about a saved tensor but its memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <c10/util/typeid.h>

#include <cstdint>

#include "neap/offload/link.h"

namespace neap::offload {

// A plain strided tensor with memory of its own: neither sparse, quantized, nested, a subclass, named, nor anything
// else that more than sizes, strides, dtype and the conjugate and negative bits would be needed for to make it again.
bool is_plain(const at::Tensor& tensor);

// The bytes of its storage from its first to its last element. REQUIRES: is_plain(tensor), numel() > 0.
ByteRange bytes_of(const at::Tensor& tensor);

class TensorLayout {
 public:
  TensorLayout() = default;
  // REQUIRES: is_plain(tensor).
  explicit TensorLayout(const at::Tensor& tensor);

  // A tensor like the one this was made of, over `storage`, with every byte `origin` bytes further. It has no history
  // and a version counter of its own; no operator is dispatched.
  at::Tensor over(const c10::Storage& storage, int64_t origin) const;

  c10::IntArrayRef sizes() const { return shape_.sizes_arrayref(); }
  c10::TensorOptions options(c10::Device device) const { return c10::TensorOptions().device(device).dtype(dtype_); }

 private:
  c10::impl::SizesAndStrides shape_;
  int64_t offset_ = 0;  // in elements
  caffe2::TypeMeta dtype_;
  c10::DispatchKeySet keys_;  // they carry the conjugate and negative bits
};

}  // namespace neap::offload
