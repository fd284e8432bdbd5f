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

Engine::Move move_of(const Tensor& from, const Tensor& to) {
  return {to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes()};
}

// The copy itself where one memcpy does not do, on CPU tensors over both ends. It runs later and elsewhere: the blocks
// named in the copy's ranges keep the memory alive, these tensors carry no more than addresses.
std::function<void()> conversion(const Tensor& self, const Tensor& dst) {
  const Tensor from = on_sim(self) ? cpu_alias(self) : self;
  const Tensor to = on_sim(dst) ? cpu_alias(dst) : dst;
  return [to, from = from.expand(to.sizes())] {
    const c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    to.copy_(from);
  };
}

void submit(Stream* stream, Link link, const Tensor& from, const Tensor& to, std::span<const Range> ranges,
            const char* what, Wait wait) {
  if (one_memcpy_does(from, to)) return engine().submit_copy(stream, link, move_of(from, to), ranges, what, wait);
  const auto bytes = static_cast<std::size_t>(to.numel()) * std::max(to.itemsize(), from.itemsize());
  engine().submit_copy(stream, link, bytes, ranges, what, conversion(from, to), wait);
}

void copy_between_devices(const Tensor& from, const Tensor& to, std::span<const Range> ranges) {
  // After and before whatever the destination's current stream has to do, as on CUDA.
  auto *source = current_stream(from), *target = current_stream(to);
  Event ready, done;
  engine().record(ready, target);
  engine().wait(source, ready);
  submit(source, Link::kPeer, from, to, ranges, "copy peer", Wait::kNo);
  engine().record(done, source);
  engine().wait(target, done);
}

void copy_to_or_from_host(const Tensor& from, const Tensor& to, std::span<const Range> ranges, bool non_blocking) {
  const bool to_host = on_sim(from);
  const Tensor& host = to_host ? to : from;
  auto* stream = current_stream(to_host ? from : to);
  auto* host_block = ranges[to_host ? 1 : 0].block;
  const bool queued = non_blocking && host_block;
  submit(stream, to_host ? Link::kDeviceToHost : Link::kHostToDevice, from, to, ranges,
         to_host ? "copy d2h" : "copy h2d", queued ? Wait::kNo : Wait::kForCompletion);
  // The caller may drop a pinned tensor at once; as CUDA's copy does, keep its block from being reused too early.
  // A block that the tensor does not own, a slab's, is its owner's to guard.
  if (queued && block_of(host.storage().data_ptr()) == host_block) engine().record_stream(host_block, stream);
}

void copy_on_device(const Tensor& from, const Tensor& to, std::span<const Range> ranges) {
  const auto convert = one_memcpy_does(from, to) ? nullptr : conversion(from, to);
  engine().begin_kernel(current_stream(to), ranges, "copy on device",
                        {.bytes = traffic_bytes(from) + traffic_bytes(to)});
  if (convert) return convert();
  const auto [target, source, bytes] = move_of(from, to);
  std::memcpy(target, source, bytes);
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0 || self.is_same(dst)) return dst;
  for (const auto* end : {&self, &dst}) {
    TORCH_CHECK(on_sim(*end) || end->device().is_cpu(), "sim copies to and from CPU and sim tensors; found ",
                end->device());
  }
  const Range ranges[] = {range_of(self, /*write=*/false), range_of(dst, /*write=*/true)};
  if (on_sim(self) != on_sim(dst)) {
    copy_to_or_from_host(self, dst, ranges, non_blocking);
  } else if (self.device() != dst.device()) {
    copy_between_devices(self, dst, ranges);
  } else {
    copy_on_device(self, dst, ranges);  // an ordinary kernel
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
