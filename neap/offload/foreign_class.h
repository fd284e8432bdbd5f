// Tensors of classes that libtorch does not know of: a language over it may have given one a class of its own, which
// another tensor over the same bytes would not have.
#pragma once

#include <ATen/core/TensorBase.h>

namespace neap::offload {

// Whether a tensor is of such a class; asked for every saved tensor, on the thread that saves it.
using ForeignClass = bool (*)(const at::TensorBase& tensor);
// Process-wide; null for none. What it says yes to stays on the device.
void set_foreign_class(ForeignClass is_foreign) noexcept;

}  // namespace neap::offload
