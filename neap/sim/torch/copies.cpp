// Copies between the device, the host and other devices.
//
// Between sim and pinned host memory a non_blocking copy is queued on the current stream and runs on that stream's
// worker; with pageable memory, or without non_blocking, the call returns when the bytes are there, as on CUDA.
// A conversion or a change of layout rides along with the transfer.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "neap/sim/torch/alias.h"
#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/device_allocator.h"

namespace neap::sim {
namespace {

using at::Tensor;

bool one_memcpy_does(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// The copy itself, on CPU tensors over both ends. It runs later and elsewhere: the blocks named in the copy's ranges
// keep the memory alive, these tensors carry no more than addresses.
std::function<void()> transfer(const Tensor& from, const Tensor& to) {
  if (one_memcpy_does(from, to)) {
    return [target = to.mutable_data_ptr(), source = from.const_data_ptr(), bytes = to.nbytes()] {
      std::memcpy(target, source, bytes);
    };
  }
  return [to, from = from.expand(to.sizes())] {
    const c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    to.copy_(from);
  };
}

void copy_between_devices(const Tensor& from, const Tensor& to, std::span<const Range> ranges, std::size_t bytes,
                          std::function<void()> work) {
  // After and before whatever the destination's current stream has to do, as on CUDA.
  auto *source = current_stream(from), *target = current_stream(to);
  Event ready, done;
  engine().record(ready, target);
  engine().wait(source, ready);
  engine().submit_copy(source, Link::kPeer, bytes, ranges, "copy peer", std::move(work), Wait::kNo);
  engine().record(done, source);
  engine().wait(target, done);
}

void copy_to_or_from_host(const Tensor& from, const Tensor& to, std::span<const Range> ranges, std::size_t bytes,
                          std::function<void()> work, bool non_blocking) {
  const bool to_host = on_sim(from);
  const Tensor& host = to_host ? to : from;
  auto* stream = current_stream(to_host ? from : to);
  auto* host_block = ranges[to_host ? 1 : 0].block;
  const bool queued = non_blocking && host_block;
  engine().submit_copy(stream, to_host ? Link::kDeviceToHost : Link::kHostToDevice, bytes, ranges,
                       to_host ? "copy d2h" : "copy h2d", std::move(work), queued ? Wait::kNo : Wait::kForCompletion);
  // The caller may drop a pinned tensor at once; as CUDA's copy does, keep its block from being reused too early.
  // A block that the tensor does not own, a slab's, is its owner's to guard.
  if (queued && block_of(host.storage().data_ptr()) == host_block) engine().record_stream(host_block, stream);
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0 || self.is_same(dst)) return dst;
  const bool from_sim = on_sim(self), to_sim = on_sim(dst);
  for (const auto* end : {&self, &dst}) {
    TORCH_CHECK(on_sim(*end) || end->device().is_cpu(), "sim copies to and from CPU and sim tensors; found ",
                end->device());
  }
  const Tensor from = from_sim ? cpu_alias(self) : self;
  const Tensor to = to_sim ? cpu_alias(dst) : dst;
  const Range ranges[] = {range_of(self, /*write=*/false), range_of(dst, /*write=*/true)};
  const auto bytes = static_cast<std::size_t>(dst.numel()) * std::max(dst.itemsize(), self.itemsize());
  auto work = transfer(from, to);

  if (from_sim != to_sim) {
    copy_to_or_from_host(self, dst, ranges, bytes, std::move(work), non_blocking);
  } else if (self.device() != dst.device()) {
    copy_between_devices(self, dst, ranges, bytes, std::move(work));
  } else {  // an ordinary kernel
    engine().begin_kernel(current_stream(dst), ranges, "copy on device",
                          {.bytes = traffic_bytes(self) + traffic_bytes(dst)});
    work();
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

}  // namespace

void register_copies(torch::Library& aten) {
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
}

}  // namespace neap::sim
