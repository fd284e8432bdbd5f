#include "neap/sim/torch/alias.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <memory>

#include "neap/sim/torch/device_allocator.h"

namespace neap::sim {
namespace {

// Allocator of alias storages: device memory under a CPU label, so that a kernel that grows an out= tensor allocates on
// the device straight away. The label matters: a view takes its device from the storage.
class AliasAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    return relabelled(device_allocator().allocate(bytes), c10::Device(c10::kCPU));
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

AliasAllocator& alias_allocator() {
  static auto* allocator = new AliasAllocator;  // leaked: storages outlive static objects
  return *allocator;
}

void drop_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

}  // namespace

Extent extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
  return {begin, begin + static_cast<std::size_t>(last + 1) * tensor.itemsize()};
}

double traffic_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.stride(i) != 0) elements *= tensor.size(i);
  return static_cast<double>(elements) * static_cast<double>(tensor.itemsize());
}

Range range_of(const at::Tensor& tensor, bool write) {
  const auto [begin, end] = extent(tensor);
  const auto& pointer = tensor.storage().data_ptr();
  if (auto* block = block_of(pointer)) return {block, begin, end, write};
  if (on_sim(tensor)) return {};
  // A host tensor made over a piece of somebody's pinned slab: its DataPtr is not ours, its bytes are.
  const auto* data = static_cast<const std::byte*>(pointer.get());
  auto* block = data ? engine().find_pinned(data + begin) : nullptr;
  if (!block) return {};
  const auto offset = static_cast<std::size_t>(data - static_cast<const std::byte*>(block->data()));
  return {block, offset + begin, offset + end, write};
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

c10::Storage cpu_alias(const c10::Storage& storage) {
  void* data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::Device(c10::kCPU)),
                      &alias_allocator(), /*resizable=*/true);
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return tensor_over(cpu_alias(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

c10::DataPtr relabelled(c10::DataPtr pointer, c10::Device device) {
  void* data = pointer.get();
  const auto deleter = pointer.get_deleter();
  void* context = pointer.release_context();
  return {data, context, deleter, device};
}

c10::Storage adopt(c10::Storage cpu, int device) {
  const std::size_t bytes = cpu.nbytes();
  void* data = cpu.mutable_data();
  c10::DataPtr pointer(nullptr, sim_device(device));
  if (bytes != 0 && data) {
    auto owner = std::make_unique<c10::Storage>(std::move(cpu));
    MemoryShortage shortage;
    auto* block = engine().adopt(engine().current_stream(device), data, bytes, &drop_storage, owner.get(), &shortage);
    if (!block) throw_out_of_memory(shortage);
    (void)owner.release();
    pointer = owning_pointer(block, sim_device(device));
  }
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), &device_allocator(),
                      /*resizable=*/true);
}

}  // namespace neap::sim
