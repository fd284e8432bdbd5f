// torch-free
// The collectives as messages between the ranks of one group. One Exchange is one collective of one rank; it blocks the
// calling thread.
//
// Buffers are bytes. `cuts` are size + 1 offsets in bytes: rank r's piece is [cuts[r], cuts[r + 1]). Every rank talks
// to its nearest neighbours first, so that no rank is everybody's first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "neap/comm/internal/call_header.h"
#include "neap/comm/internal/fabric.h"

namespace neap::comm::internal {

// Reduces one stretch of the rows that lie at rows[0], rows[1], … in rank order, and writes the result. `offset` and
// `bytes` count bytes of a row, from the start of the piece.
using ReduceRows = std::function<void(std::span<const std::byte* const> rows, int64_t offset, int64_t bytes)>;

// Where a collective stands, for whoever asks why it does not end. Thread-safe.
struct Progress {
  std::atomic<int> waits_for{-1};   // index in the group
  std::atomic<bool> agreed{false};  // all headers are there
};

// What an Exchange throws instead of LinkLost: it knows which peer.
class PeerLost : public LinkLost {
 public:
  PeerLost(int peer, const std::string& text) : LinkLost(text), peer(peer) {}
  const int peer;
};

class Exchange {
 public:
  // Of a reduction's rows, this many bytes of each peer are on the wire at a time, while as many are being added. Each
  // chunk costs two wake-ups of a thread, which smaller ones would feel on a busy machine.
  static constexpr int64_t kChunk = 1 << 20;
  // Up to here an all_reduce sends whole rows: one round of messages instead of two.
  static constexpr int64_t kSmall = 16 << 10;

  // `scratch` is kept by the caller from one collective to the next.
  Exchange(Transport& transport, int rank, int size, Progress& progress, std::vector<std::byte>& scratch);

  // Everyone's header, in rank order. All ranks have entered when it returns.
  std::vector<CallHeader> headers(const CallHeader& mine);

  void all_gather(std::byte* full, std::span<const int64_t> cuts);
  // `unit` is the size of an element: chunks hold whole ones.
  void reduce_scatter(const std::byte* full, std::span<const int64_t> cuts, int64_t unit, const ReduceRows& reduce);
  // In place. `reduce(begin)` gives the ReduceRows that writes at offset `begin` of the buffer.
  void all_reduce(std::byte* buffer, int64_t elements, int64_t unit,
                  const std::function<ReduceRows(int64_t begin)>& reduce);
  void broadcast(std::byte* buffer, int64_t bytes, int root);

  [[nodiscard]] int64_t sent() const { return sent_; }
  [[nodiscard]] int64_t received() const { return received_; }

 private:
  struct Pending {
    int peer;
    std::unique_ptr<Transfer> transfer;
  };
  using Batch = std::vector<Pending>;

  int next(int distance) const { return (rank_ + distance) % size_; }
  int previous(int distance) const { return (rank_ - distance + size_) % size_; }
  void send(Batch& batch, int to, const std::byte* bytes, int64_t size);
  void receive(Batch& batch, int from, std::byte* bytes, int64_t size);
  void wait(Batch& batch);
  void reduce_small(std::byte* buffer, int64_t bytes, const ReduceRows& reduce);

  Transport& transport_;
  const int rank_, size_;
  Progress& progress_;
  std::vector<std::byte>& scratch_;
  int64_t sent_ = 0, received_ = 0;
};

}  // namespace neap::comm::internal
