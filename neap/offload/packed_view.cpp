#include "neap/offload/packed_view.h"

#include <utility>

#include "neap/autograd/detached_alias.h"
#include "neap/base/error_boundary.h"
#include "neap/offload/unit_hook.h"

namespace neap::offload {

void PackedView::call_pack_hook(const at::Tensor& tensor) {
  at_error_boundary([&] { pack(tensor); });
}

at::Tensor PackedView::call_unpack_hook() {
  return at_error_boundary([&] { return unpack(); });
}

void PackedView::pack(const at::Tensor& tensor) {
  version_ = autograd::VersionStamp(tensor);
  PackScope& scope = *std::exchange(scope_, nullptr);
  scope.count_saved();
  if (scope.may_leave(tensor)) {
    place_ = scope.tape().pack(tensor, scope.unit());
    if (place_.storage != nullptr) {
      layout_ = TensorLayout(tensor);
      return;
    }
  }
  scope.count_kept();
  // Without history there is nothing that the tensor could keep alive: itself, as autograd saves it. So one of a Python
  // class comes back as what it is, and a parameter with the data that it has by then.
  kept_ = tensor.is_leaf() ? tensor : autograd::detached_alias(tensor);
}

at::Tensor PackedView::unpack() {
  if (place_.storage == nullptr) {
    version_.check(kept_);
    return kept_;
  }
  Tape& tape = *place_.storage->tape();
  version_.check(layout_.options(tape.device()), layout_.sizes());
  const Unpacked bytes = tape.unpack(place_);
  return layout_.over(bytes.device, bytes.origin);
}

}  // namespace neap::offload
