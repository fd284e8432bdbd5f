#include "neap/offload/link.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <exception>
#include <utility>

namespace neap::offload {

Link::Link(device::Device& device, bool overlap) : device_(device), overlaps_(overlap && device.asynchronous()) {}

Link::CopiedOut Link::copy_out(const c10::Storage& source, ByteRange range, memory::HostBuffer& host, Moment& now) {
  const device::ByteSpan to = host.span();
  const device::ByteSpan from{source, range.begin, range.size()};
  if (!overlaps_) {
    copy_in_order(to, from, now.stream(), out_stalls_);
    host.set_pending(now.stream().record());
    return {};
  }
  const device::Stream out = device_.copy_stream(device::Direction::kOut);
  now.goes_before(out);
  device::Event done = enqueue(to, from, out, out_rate_);
  host.set_pending(done);
  return {std::move(done), ++copies_out_};
}

device::Event Link::copy_in(memory::HostBuffer& host, int64_t copied_out, const c10::Storage& target, int64_t pad,
                            Moment& now) {
  const device::ByteSpan from = host.span();
  const device::ByteSpan to{target, pad, from.size};
  if (!overlaps_) {
    now.stream().wait(host.pending());  // the bytes may have gone out on another compute stream
    copy_in_order(to, from, now.stream(), in_stalls_);
    host.set_pending(now.stream().record());
    return host.pending();
  }
  const device::Stream in = device_.copy_stream(device::Direction::kIn);
  // The bytes may still be on their way out. Backward reads from the end, so one wait often covers a whole pass.
  if (copied_out > in_has_waited_for_) {
    in.wait(host.pending());
    in_has_waited_for_ = copied_out;
  }
  now.goes_before(in);  // the compute stream may still use what lay where `target` now is
  device::Event done = enqueue(to, from, in, in_rate_);
  host.set_pending(done);
  return done;
}

device::Event Link::enqueue(const device::ByteSpan& to, const device::ByteSpan& from, const device::Stream& copies,
                            LinkRate& rate) {
  device::Event begin;
  if (rate.wants_sample()) begin = copies.record_timed();
  device::copy_bytes_async(to, from, copies);
  device::Event done;
  try {
    done = copies.record_timed();
  } catch (...) {
    // The copy is under way and nothing says when it ends: the caller is about to let go of both sides.
    copies.synchronize();
    throw;
  }
  if (!begin.is_null()) rate.add(std::move(begin), done, Bytes(from.size));
  return done;
}

void Link::copy_in_order(const device::ByteSpan& to, const device::ByteSpan& from, const device::Stream& compute,
                         StallMeter& stalls) {
  if (!device_.asynchronous()) {
    const int64_t begin = device_.now_ns();
    device::copy_bytes_async(to, from, compute);
    stalls.add_exposed_ns(device_.now_ns() - begin);
    return;
  }
  const device::Event begin = compute.record_timed();
  device::copy_bytes_async(to, from, compute);
  try {
    stalls.add_wait(begin, compute.record_timed(), Bytes(from.size));
  } catch (...) {
    compute.synchronize();
    throw;
  }
}

c10::Storage Link::allocate(int64_t bytes) const {
  const c10::DeviceGuard guard(device_.c10_device());
  c10::Allocator* allocator = c10::GetAllocator(device_.c10_device().type());
  const auto size = static_cast<size_t>(bytes);
  return c10::Storage(c10::Storage::use_byte_size_t(), size, allocator->allocate(size), allocator, /*resizable=*/true);
}

}  // namespace neap::offload
