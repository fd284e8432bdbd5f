// torch-free
// Collectives that a device's own library does over its own links, such as NCCL: what a Group uses for memory that the
// host cannot reach. Pieces are equal and tensors are contiguous; buffers may overlap where a rank's piece lies in its
// own slice. Each call enqueues on the thread's current stream and returns; what it was given must live until that
// stream has passed it. One thread at a time, but for abort().
#pragma once

#include "neap/comm/internal/breakable.h"

namespace at {
class Tensor;
}

namespace neap::comm::internal {

class DeviceGroup : public Breakable {
 public:
  virtual void all_gather(const at::Tensor& full, const at::Tensor& mine) = 0;
  // Slice r of `full` becomes rank r's row of this rank's number: `rows` has as many elements as `full`.
  virtual void all_to_all(const at::Tensor& rows, const at::Tensor& full) = 0;
  // In the dtype of `full`, which is that of `mine`, in the library's order.
  virtual void reduce_scatter_sum(const at::Tensor& mine, const at::Tensor& full) = 0;
  virtual void all_reduce_sum(const at::Tensor& tensor) = 0;
  virtual void all_reduce_max(const at::Tensor& tensor) = 0;
  virtual void broadcast(const at::Tensor& tensor, int root) = 0;
};

}  // namespace neap::comm::internal
