// Copies of flat bytes between device and host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "neap/base/bytes.h"
#include "neap/device/stream.h"

namespace neap::device {

// A flat uint8 tensor over [offset, offset + size) of a storage, on any device. It shares ownership of the storage and
// nothing else: no autograd history, a version counter of its own, and no operator is dispatched to make it.
// REQUIRES: the range lies in the storage.
at::Tensor byte_view(const c10::Storage& storage, int64_t offset, int64_t size);
at::Tensor byte_view(const c10::Storage& storage);

// Enqueues the copy on `stream` and returns before it is done, when the device is asynchronous and the host side is
// pinned; with pageable memory or a plain CPU it may return after. The caller orders `stream` after whatever made `src`
// and last used `dst`, and keeps both alive until an event recorded after this call has passed.
//
// Autograd, autocast and Python dispatch modes do not see the copy. Errors of the device come out as they are
// (c10::Error); nothing is enqueued then.
// REQUIRES: both flat, contiguous uint8 of one size; at least one on stream.device(), the other there or on the CPU.
void copy_bytes_async(const at::Tensor& dst, const at::Tensor& src, const Stream& stream);

// Bytes [offset, offset + size) of a storage, which lives as long as this is used. REQUIRES: the range lies in it.
struct ByteSpan {
  const c10::Storage& storage;
  int64_t offset = 0;
  int64_t size = 0;
};
// The same, without tensors where they would cost more than the bytes do.
void copy_bytes_async(const ByteSpan& dst, const ByteSpan& src, const Stream& stream);

}  // namespace neap::device
