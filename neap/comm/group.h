// torch-free
// Collectives among some ranks of the world, on flat buffers. Start here; World (world.h) makes Groups.
//
// Every rank of the group calls the same collectives in the same order, with equal `unit`, sizes and dtype: a small
// header goes ahead of every payload and makes anything else an error on every rank (failure.h), within the timeout at
// the latest. `unit` is a label for people ("layers.3"), part of every error text.
//
// Tensors are contiguous and are taken as flat; gathers and broadcasts move bytes of any dtype, reductions know
// float32, float64, bfloat16, float16, int32 and int64. Nothing is copied beside the wire, but for a gather's own piece
// when `mine` lies elsewhere; a reduction keeps at most two chunks of each other rank at a time. Autograd and version
// counters see nothing of it: like any write through a raw pointer, also into a leaf that requires a gradient.
//
// Reductions over CPU and sim tensors add in rank order, ((r0 + r1) + r2) + …, element by element, in float32 (float64
// for float64, int64 for integers), and round once at the end. So the bits depend on the ranks' values alone: not on
// how a buffer is cut, nor on its layout, and they equal one process that adds the same tensors in the same order
// (docs/decisions/0005-own-reductions.md). All ranks get the same bits.
//
// Bytes on the wire per rank, of n ranks and a full buffer of B bytes: all_gather and reduce_scatter (n-1)/n · B each
// way, all_reduce twice that (small ones: (n-1) · B, one round), broadcast (n-1) · B out of the root.
//
// Calls come from one thread at a time and return before the collective is done. Groups belong to their World.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/comm/work.h"

namespace at {
class Tensor;
}

namespace neap::comm {

enum class Collective : uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };
inline constexpr int kNumCollectives = 5;
const char* to_string(Collective kind);  // "all_gather", …

enum class ReduceOp : uint8_t {
  kSum,
  kAverage,  // the sum divided by the size of the group
  kMax,      // NaN wins
};

struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  // The result is multiplied by it, after op and before the one rounding. Not with kMax, nor for integers.
  double factor = 1;
};

// How many elements of a full buffer each rank of the group holds, one after another; some may hold none. Empty: all
// the same, and the buffer must divide. The same on every rank.
using Pieces = std::span<const int64_t>;

// Since the group was made.
struct Counters {
  struct Kind {
    int64_t calls = 0;
    Bytes bytes;  // of the full buffers

    bool operator==(const Kind&) const = default;
  };
  Kind kinds[kNumCollectives];
  Bytes sent, received;      // payload on the wire; not the headers
  Bytes copied;              // a gather's own piece, copied because it was not in place
  int64_t host_wait_ns = 0;  // the host stood in Work::wait() or synchronize(), real time

  const Kind& of(Collective kind) const { return kinds[static_cast<int>(kind)]; }
  int64_t calls() const;
  bool operator==(const Counters&) const = default;
};

namespace internal {
class GroupCore;
}

class Group {
 public:
  explicit Group(std::unique_ptr<internal::GroupCore> core);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] int rank() const noexcept;  // this rank's index in the group
  [[nodiscard]] int size() const noexcept;
  [[nodiscard]] const std::string& name() const noexcept;        // "world", "shard 0"
  [[nodiscard]] const std::vector<int>& ranks() const noexcept;  // world ranks of the members

  // Every rank's piece into every rank's `full`. In place: this rank's piece already lies in its slice of `full`, or
  // `mine` is that slice; else `mine`, of the same dtype and of this rank's piece's size, is copied there first.
  Work all_gather(const at::Tensor& full, std::string_view unit, Pieces pieces = {});
  Work all_gather(const at::Tensor& full, const at::Tensor& mine, std::string_view unit, Pieces pieces = {});

  // The reduced piece of this rank into `mine`, which may be its slice of `full`; the rest of `full` stays as it is.
  // `mine` may have another dtype than `full`, say float32 under bfloat16 gradients: `full` crosses the wire as it is,
  // and the sum is rounded to the dtype of `mine`.
  Work reduce_scatter(const at::Tensor& mine, const at::Tensor& full, const Reduction& reduction, std::string_view unit,
                      Pieces pieces = {});

  // Reductions of such tensors add up row by row in rank order, in float32 at least whatever the dtype of the rows.
  // Otherwise the device's library sums, in the dtype of the rows and in an order of its own.
  [[nodiscard]] bool adds_in_rank_order(const at::Tensor& like) const;

  // In place.
  Work all_reduce(const at::Tensor& tensor, const Reduction& reduction, std::string_view unit);

  // The tensor of the group's rank `root` into every rank's, in place.
  Work broadcast(const at::Tensor& tensor, int root, std::string_view unit);

  // Done once every rank has called it. Blocks no one until waited for. Does not wait for work of devices.
  Work barrier(std::string_view unit);

  [[nodiscard]] Counters counters() const;

  // Blocks until every collective started so far has ended, well or not.
  void wait_idle();

 private:
  std::unique_ptr<internal::GroupCore> core_;
};

}  // namespace neap::comm
