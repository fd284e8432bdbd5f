#include "neap/device/copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <optional>

#include "neap/base/error.h"
#include "neap/device/device.h"

namespace neap::device {
namespace {

// What lies above a plain copy: Python's dispatch modes, and the snapshot they take of the thread's state.
constexpr c10::DispatchKeySet kPythonKeys({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// Bytes on a plain CPU for which calling the operator costs more than moving them. Larger ones it moves on all threads.
constexpr int64_t kSmall = 32768;

void check_operand(const at::Tensor& tensor, const char* name, const Device& device) {
  NEAP_ASSERT(tensor.scalar_type() == at::kByte && tensor.dim() == 1 && tensor.is_contiguous(), "copy: ", name,
              " is not flat bytes");
  NEAP_ASSERT(tensor.device() == device.c10_device() || tensor.is_cpu(), "copy: ", name, " is on ", tensor.device(),
              ", the stream on ", device.c10_device());
}

bool is_memcpy(const Device& device, int64_t size) { return !device.asynchronous() && size <= kSmall; }

void check_range(const c10::Storage& storage, int64_t offset, int64_t size) {
  NEAP_ASSERT(offset >= 0 && size >= 0 && offset <= static_cast<int64_t>(storage.nbytes()) - size, "bytes [", offset,
              ", ", offset, " + ", size, ") of a storage of ", storage.nbytes());
}

at::Tensor byte_view(const ByteSpan& span) { return device::byte_view(span.storage, span.offset, span.size); }

}  // namespace

at::Tensor byte_view(const c10::Storage& storage, int64_t offset, int64_t size) {
  check_range(storage, offset, size);
  // Built by hand, not with at::empty().set_(): half the cost, and no dispatch mode or autograd state to mind.
  const auto key = c10::computeDispatchKey(at::kByte, c10::kStrided, storage.device());
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                       caffe2::TypeMeta::Make<uint8_t>());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous({size});
  return view;
}

at::Tensor byte_view(const c10::Storage& storage) {
  return byte_view(storage, 0, static_cast<int64_t>(storage.nbytes()));
}

void copy_bytes_async(const at::Tensor& dst, const at::Tensor& src, const Stream& stream) {
  auto& device = stream.device();
  check_operand(dst, "destination", device);
  check_operand(src, "source", device);
  NEAP_ASSERT(dst.numel() == src.numel(), "copy of ", src.numel(), " bytes to ", dst.numel());
  NEAP_ASSERT(!device.asynchronous() || !(dst.is_cpu() && src.is_cpu()), "copy on a stream of ", device.c10_device(),
              " between two CPU tensors");
  device.announce({dst.is_cpu() ? Direction::kOut : Direction::kIn, Bytes(src.numel())});
  if (is_memcpy(device, src.numel())) {
    std::memcpy(dst.mutable_data_ptr(), src.const_data_ptr(), static_cast<size_t>(src.numel()));
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_python(kPythonKeys);
  std::optional<c10::StreamGuard> on_stream;
  if (device.asynchronous()) on_stream.emplace(stream.unwrap());
  dst.copy_(src, /*non_blocking=*/true);
}

void copy_bytes_async(const ByteSpan& dst, const ByteSpan& src, const Stream& stream) {
  auto& device = stream.device();
  if (!is_memcpy(device, src.size)) return copy_bytes_async(byte_view(dst), byte_view(src), stream);
  NEAP_ASSERT(dst.size == src.size, "copy of ", src.size, " bytes to ", dst.size);
  for (const ByteSpan* span : {&dst, &src}) {
    NEAP_ASSERT(span->storage.device_type() == device.c10_device().type(), "copy on ", device.c10_device(),
                " of bytes on ", span->storage.device());
    check_range(span->storage, span->offset, span->size);
  }
  device.announce({Direction::kOut, Bytes(src.size)});  // there is but one side
  std::memcpy(static_cast<std::byte*>(dst.storage.mutable_data()) + dst.offset,
              static_cast<const std::byte*>(src.storage.data()) + src.offset, static_cast<size_t>(src.size));
}

}  // namespace neap::device
