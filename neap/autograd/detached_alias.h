// What tensor.detach() gives, without the dispatcher: shares memory and version counter, has no history.
//
// For hook objects, which must not hold the tensor that they are given (see saved_tensor_scope.h). Python's dispatch
// modes do not see it; a tensor of a subclass of Python's is detached by its class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace neap::autograd {

inline at::Tensor detached_alias(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::impl::ExcludeDispatchKeyGuard below_modes(
      impl->is_python_dispatch() ? c10::DispatchKeySet() : c10::DispatchKeySet(c10::DispatchKey::Python));
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

}  // namespace neap::autograd
