#include "neap/shard/flat_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "neap/base/error.h"

namespace neap::shard {
namespace {

c10::Storage storage_without_memory(std::size_t bytes, c10::Device device) {
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
          /*resizable=*/false};
}

at::Tensor flat_tensor(c10::Storage storage, int64_t numel, c10::ScalarType dtype, c10::Device device) {
  const at::NoGradGuard no_grad;
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// Taking the memory away by hand: the setter of the message alone would keep it.
void take_memory_away(c10::StorageImpl* storage, const std::string& message) noexcept {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

}  // namespace

FlatBuffer::FlatBuffer(int64_t numel, c10::ScalarType dtype, c10::Device device, const std::string& message)
    : tensor_(flat_tensor(storage_without_memory(static_cast<std::size_t>(numel) * c10::elementSize(dtype), device),
                          numel, dtype, device)) {
  storage_of(tensor_)->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

FlatBuffer::FlatBuffer(const at::Tensor& permanent)
    : tensor_(permanent.variable_data()), permanent_(true), allocated_(true) {
  NEAP_ASSERT(permanent.dim() == 1 && permanent.is_contiguous());
}

void FlatBuffer::allocate() {
  if (allocated_) return;
  c10::StorageImpl* storage = storage_of(tensor_);
  const c10::DeviceGuard on(tensor_.device());  // allocators serve the current device
  c10::DataPtr memory = storage->allocator()->allocate(storage->nbytes());
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(std::move(memory));
  allocated_ = true;
}

void FlatBuffer::release(const std::string& message) noexcept {
  if (!allocated_ || permanent_) return;
  take_memory_away(storage_of(tensor_), message);
  allocated_ = false;
}

at::Tensor FlatBuffer::take(const std::string& message) {
  NEAP_ASSERT(allocated_ && !permanent_);
  c10::StorageImpl* storage = storage_of(tensor_);
  c10::Storage own = storage_without_memory(storage->nbytes(), storage->device());
  own.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(storage->_mutable_data_ptr_no_checks()));
  take_memory_away(storage, message);
  allocated_ = false;
  return flat_tensor(std::move(own), tensor_.numel(), tensor_.scalar_type(), tensor_.device());
}

at::Tensor FlatBuffer::view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const {
  const at::NoGradGuard no_grad;
  return tensor_.as_strided(sizes, strides, tensor_.storage_offset() + offset);
}

}  // namespace neap::shard
