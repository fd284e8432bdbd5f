// Tensors of one device over the bytes of another: how a CPU kernel gets at device memory, and how its results become
// device tensors, without copying. Any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "neap/sim/torch/backend.h"

namespace neap::sim {

// The bytes [begin, end) of its storage that a tensor touches; a strided tensor is widened to its byte extent.
struct Extent {
  std::size_t begin = 0, end = 0;
};
Extent extent(const at::Tensor& tensor);

// What a kernel that reads or writes every element moves: a broadcast dimension (stride 0) is read once.
double traffic_bytes(const at::Tensor& tensor);

// What a kernel on, or a queued copy of, `tensor` reads or writes, be it on the device or the host. A host tensor that
// does not lie in pinned memory of ours has no block: it is neither kept alive nor checked.
Range range_of(const at::Tensor& tensor, bool write);

// A tensor with the geometry, dtype and conj/neg bits of `like` over `storage`.
at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

// CPU storage and tensor over device memory. They own nothing: the caller keeps the original alive. A kernel that
// grows such a storage allocates on the device (see CpuCall::finish()).
c10::Storage cpu_alias(const c10::Storage& storage);
at::Tensor cpu_alias(const at::Tensor& tensor);

// The same memory and owner under the label of another device.
c10::DataPtr relabelled(c10::DataPtr pointer, c10::Device device);

// Device storage over memory that a CPU kernel allocated: charged to the device, `cpu` lives until it is freed.
// Throws c10::OutOfMemoryError where the device has no room for it.
c10::Storage adopt(c10::Storage cpu, int device);

}  // namespace neap::sim
