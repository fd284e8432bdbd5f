// A flat tensor whose memory comes and goes while the tensor, its storage object and all views of it stay.
//
// Views, parameters and saved tensors that lie in it come alive again with the next allocate(). In between, whatever
// reads or writes them gets the error text of the last release(): the storage keeps its size, so that making views of
// views still works, but its memory is taken away. One thread at a time. Memory is allocated and let go on the current
// stream of the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "neap/base/bytes.h"

namespace neap::shard {

class FlatBuffer {
 public:
  // Without memory. `message` is what accesses throw until the first allocate().
  FlatBuffer(int64_t numel, c10::ScalarType dtype, c10::Device device, const std::string& message);
  // Over memory that stays: a one-dimensional contiguous tensor. allocate() and release() do nothing then.
  explicit FlatBuffer(const at::Tensor& permanent);

  // The contents are undefined. Idempotent. Throws what the device's allocator throws, and has then changed nothing.
  void allocate();
  // Idempotent. REQUIRES: no collective is using the memory.
  void release(const std::string& message) noexcept;
  // Moves the memory out into a tensor of its own. REQUIRES: allocated(), not permanent.
  at::Tensor take(const std::string& message);

  bool allocated() const { return allocated_; }
  Bytes bytes() const { return Bytes(allocated_ && !permanent_ ? static_cast<int64_t>(tensor_.nbytes()) : 0); }

  // One-dimensional. Its version counter is no parameter's, so writes through it invalidate no saved tensor.
  const at::Tensor& tensor() const { return tensor_; }
  // A view of `numel` elements from `offset` on.
  at::Tensor view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const;

 private:
  at::Tensor tensor_;
  bool permanent_ = false;
  bool allocated_ = false;
};

}  // namespace neap::shard
