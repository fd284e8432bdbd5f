#include "neap/offload/tensor_layout.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "neap/base/error.h"
#include "neap/offload/foreign_class.h"

namespace neap::offload {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// What a plain tensor may have beside its backend's bits. (A key for autocast says what kind of device it is on.)
const uint64_t kPlain =
    (c10::autocast_dispatch_keyset | DispatchKeySet({DispatchKey::Dense, DispatchKey::Conjugate, DispatchKey::Negative,
                                                     DispatchKey::ADInplaceOrView, DispatchKey::AutogradFunctionality}))
        .raw_repr() |
    c10::full_backend_mask;

// Torch before 2.12 knows tensors with named dimensions.
template <class Impl>
bool is_named(const Impl& impl) {
  if constexpr (requires { impl.has_named_tensor_meta(); }) return impl.has_named_tensor_meta();
  return false;
}

constinit std::atomic<ForeignClass> g_is_foreign = nullptr;

bool is_foreign(const at::Tensor& tensor) {
  const ForeignClass ask = g_is_foreign.load(std::memory_order_relaxed);
  return ask != nullptr && ask(tensor);
}

}  // namespace

void set_foreign_class(ForeignClass is_foreign) noexcept { g_is_foreign.store(is_foreign, std::memory_order_relaxed); }

bool is_plain(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return (impl->key_set().raw_repr() & ~kPlain) == 0 && tensor.has_storage() && impl->layout() == c10::kStrided &&
         !impl->has_symbolic_sizes_strides() && !is_named(*impl) && impl->get_backend_meta() == nullptr &&
         !impl->is_python_dispatch() && !impl->is_meta() && !is_foreign(tensor);
}

ByteRange bytes_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return {tensor.storage_offset() * item, (last + 1) * item};
}

TensorLayout::TensorLayout(const at::Tensor& tensor)
    : offset_(tensor.storage_offset()), dtype_(tensor.dtype()), keys_(tensor.key_set()) {
  const auto strides = tensor.strides();
  shape_.set_sizes(tensor.sizes());
  std::copy(strides.begin(), strides.end(), shape_.strides_begin());
}

at::Tensor TensorLayout::over(const c10::Storage& storage, int64_t origin) const {
  const auto item = static_cast<int64_t>(dtype_.itemsize());
  NEAP_ASSERT(origin % item == 0, "bytes moved by ", origin, " for elements of ", item);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys_, dtype_);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape_.sizes_arrayref(), shape_.strides_arrayref(),
                                                      offset_ + origin / item);
  return tensor;
}

}  // namespace neap::offload
