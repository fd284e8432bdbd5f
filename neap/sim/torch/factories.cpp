// Operators that make tensors or change metadata only. Native because an allocation must be able to fail before a
// kernel runs, and because a view must not count as a read.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "neap/sim/torch/alias.h"
#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/device_allocator.h"

namespace neap::sim {
namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "sim: only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "sim has strided tensors only; asked for ", *layout);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pinned) {
  check_options(layout, pinned);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// ATen's lazy zeros have no memory and a dispatch key of their own; plain zeros mean the same.
Tensor efficient_zero_tensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                             std::optional<bool> pinned) {
  return empty(size, dtype, layout, device, pinned, std::nullopt).zero_();
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const auto needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  // Grown here rather than by ATen, whose own growth would copy behind the engine's back.
  if (c10::multiply_integers(size) > 0 && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return at::native::resize_(self, size, format);
}

Tensor& set_empty(Tensor& self) {
  const c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()),
                             &device_allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, nothing, 0, {0}, {});
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto* stream = current_stream(self);
  const Range read = range_of(self, /*write=*/false);
  engine().begin_kernel(stream, {&read, 1}, "aten::_local_scalar_dense", {});
  engine().synchronize(stream);
  return at::native::_local_scalar_dense_cpu(cpu_alias(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

void register_factories(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_efficientzerotensor", &efficient_zero_tensor);
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("resize_", &resize_);
  aten.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_", &set_empty);
  aten.impl("_local_scalar_dense", &local_scalar_dense);
  aten.impl("record_stream", &record_stream);
}

}  // namespace neap::sim
