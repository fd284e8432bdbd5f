// Copies of a save's pieces in pinned host memory, from which a thread writes while the run goes on.
//
// The blocks come from a pool that keeps them for the next save: once it has grown to what a rank writes, saving
// allocates nothing. Not thread-safe; the buffers go back from any thread.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/checkpoint/piece.h"
#include "neap/memory/host_pool.h"

namespace neap::checkpoint::internal {

class HostCopies {
 public:
  // `limit`: bytes that the pool may hold; none: no limit.
  explicit HostCopies(std::optional<Bytes> limit) : limit_(limit) {}

  // Enqueues the copies on the devices' out-streams, behind the work of their current streams, which in turn wait for
  // the copies before they change anything; the host waits for nothing. Each piece's data becomes its copy, which may
  // be read when the buffer's pending event has passed: HostBuffer::read(). One buffer for each piece, null for one
  // without elements. Empty, with nothing changed, when there is not as much memory.
  std::optional<std::vector<memory::HostBuffer>> take(std::vector<Piece>& pieces);

  // All zero before the first take().
  memory::PoolCounters counters() const { return pool_ ? pool_->counters() : memory::PoolCounters{}; }

 private:
  std::optional<std::vector<memory::HostBuffer>> acquire(const std::vector<Piece>& pieces);

  const std::optional<Bytes> limit_;
  std::unique_ptr<memory::HostPool> pool_;
};

}  // namespace neap::checkpoint::internal
