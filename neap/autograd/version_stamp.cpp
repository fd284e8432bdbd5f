#include "neap/autograd/version_stamp.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <string>

namespace neap::autograd {
namespace {

// As at::Tensor::toString() writes it: "CPUFloatType".
std::string type_name(const c10::TensorOptions& options) {
  const c10::DispatchKey key = options.computeDispatchKey();
  const std::string backend =
      key == c10::DispatchKey::PrivateUse1 ? c10::get_privateuse1_backend() : std::string(c10::toString(key));
  return backend + c10::toString(c10::typeMetaToScalarType(options.dtype())) + "Type";
}

}  // namespace

c10::IntArrayRef listed_sizes(const at::TensorBase& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.is_nested() || impl->has_symbolic_sizes_strides() ? c10::IntArrayRef() : tensor.sizes();
}

VersionStamp::VersionStamp(const at::TensorBase& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  expected_ = counter_.current_version();
}

void VersionStamp::fail(const c10::TensorOptions& options, c10::IntArrayRef sizes) const {
  TORCH_CHECK(
      false, "one of the variables needed for gradient computation has been modified by an inplace operation: [",
      type_name(options), " ", sizes, "] is at version ", counter_.current_version(), "; expected version ", expected_,
      " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
      "with torch.autograd.set_detect_anomaly(True, check_nan=False).");
}

}  // namespace neap::autograd
