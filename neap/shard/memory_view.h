// Ways to look at memory that autograd is not to notice; internal to the layer.
#pragma once

#include <ATen/core/Tensor.h>

namespace neap::shard {

// The parameter looks at other memory from now on; what autograd knows of it stays. Unlike set_data() this keeps the
// gradient accumulator when the dtype changes, and it can lead from the meta device to a real one.
inline void look_at(const at::Tensor& parameter, const at::Tensor& view) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

// The elements in the order of memory.
inline at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

// A gradient must be no autograd view: torch::optim's zero_grad() detaches it in place.
inline at::Tensor as_gradient(const at::Tensor& view) { return view.variable_data(); }

}  // namespace neap::shard
