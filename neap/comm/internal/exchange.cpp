// torch-free
#include "neap/comm/internal/exchange.h"

#include <algorithm>
#include <array>
#include <utility>

namespace neap::comm::internal {

Exchange::Exchange(Transport& transport, int rank, int size, Progress& progress, std::vector<std::byte>& scratch)
    : transport_(transport), rank_(rank), size_(size), progress_(progress), scratch_(scratch) {}

void Exchange::send(Batch& batch, int to, const std::byte* bytes, int64_t size) {
  if (size == 0) return;  // the receiver knows
  progress_.waits_for.store(to, std::memory_order_relaxed);
  try {
    batch.push_back({to, transport_.send(to, {bytes, static_cast<size_t>(size)})});
  } catch (const LinkLost& lost) {
    throw PeerLost(to, lost.what());
  }
  sent_ += size;
}

void Exchange::receive(Batch& batch, int from, std::byte* bytes, int64_t size) {
  if (size == 0) return;
  progress_.waits_for.store(from, std::memory_order_relaxed);
  try {
    batch.push_back({from, transport_.receive(from, {bytes, static_cast<size_t>(size)})});
  } catch (const LinkLost& lost) {
    throw PeerLost(from, lost.what());
  }
  received_ += size;
}

void Exchange::wait(Batch& batch) {
  for (auto& [peer, transfer] : batch) {
    progress_.waits_for.store(peer, std::memory_order_relaxed);
    try {
      transfer->wait();
    } catch (const LinkLost& lost) {
      throw PeerLost(peer, lost.what());
    }
  }
  batch.clear();
}

std::vector<CallHeader> Exchange::headers(const CallHeader& mine) {
  std::vector<CallHeader> all(static_cast<size_t>(size_));
  all[static_cast<size_t>(rank_)] = mine;
  Batch receives, sends;
  for (int d = 1; d < size_; ++d) {
    auto& slot = all[static_cast<size_t>(previous(d))];
    receive(receives, previous(d), reinterpret_cast<std::byte*>(&slot), sizeof(slot));
  }
  for (int d = 1; d < size_; ++d) send(sends, next(d), reinterpret_cast<const std::byte*>(&mine), sizeof(mine));
  wait(receives);
  wait(sends);
  progress_.agreed.store(true, std::memory_order_relaxed);
  sent_ = received_ = 0;  // headers do not count
  return all;
}

void Exchange::all_gather(std::byte* full, std::span<const int64_t> cuts) {
  const auto begin = [&](int r) { return cuts[static_cast<size_t>(r)]; };
  const auto bytes = [&](int r) { return begin(r + 1) - begin(r); };
  Batch batch;
  for (int d = 1; d < size_; ++d) receive(batch, previous(d), full + begin(previous(d)), bytes(previous(d)));
  for (int d = 1; d < size_; ++d) send(batch, next(d), full + begin(rank_), bytes(rank_));
  wait(batch);
}

void Exchange::reduce_scatter(const std::byte* full, std::span<const int64_t> cuts, int64_t unit,
                              const ReduceRows& reduce) {
  const int64_t chunk = std::max<int64_t>(kChunk / unit, 1) * unit;
  const auto begin = [&](int r) { return cuts[static_cast<size_t>(r)]; };
  const auto bytes = [&](int r) { return begin(r + 1) - begin(r); };
  const int64_t mine = bytes(rank_);
  const int64_t slot = std::min(chunk, mine);  // of one peer, in one of the two halves of the scratch
  scratch_.resize(std::max(scratch_.size(), static_cast<size_t>(2 * (size_ - 1) * slot)));
  const auto scratch = [&](int64_t number, int d) {
    return scratch_.data() + ((number % 2) * (size_ - 1) + d - 1) * slot;
  };

  std::array<Batch, 2> receives;  // declared before the sends, so given up after them
  const auto post = [&](int64_t number) {
    const int64_t size = std::clamp<int64_t>(mine - number * slot, 0, slot);
    for (int d = 1; d < size_; ++d)
      receive(receives[static_cast<size_t>(number % 2)], previous(d), scratch(number, d), size);
  };
  if (mine > 0) post(0), post(1);
  Batch sends;
  for (int d = 1; d < size_; ++d) {
    const int to = next(d);
    const int64_t size = std::min(chunk, bytes(to));
    for (int64_t at = 0; at < bytes(to); at += size)
      send(sends, to, full + begin(to) + at, std::min(size, bytes(to) - at));
  }
  std::vector<const std::byte*> rows(static_cast<size_t>(size_));
  for (int64_t number = 0, at = 0; at < mine; ++number, at += slot) {
    wait(receives[static_cast<size_t>(number % 2)]);
    for (int d = 1; d < size_; ++d) rows[static_cast<size_t>(previous(d))] = scratch(number, d);
    rows[static_cast<size_t>(rank_)] = full + begin(rank_) + at;
    reduce(rows, at, std::min(slot, mine - at));
    post(number + 2);
  }
  wait(sends);
}

void Exchange::reduce_small(std::byte* buffer, int64_t bytes, const ReduceRows& reduce) {
  scratch_.resize(std::max(scratch_.size(), static_cast<size_t>((size_ - 1) * bytes)));
  std::vector<const std::byte*> rows(static_cast<size_t>(size_), buffer);
  Batch batch;
  for (int d = 1; d < size_; ++d) {
    std::byte* row = scratch_.data() + (d - 1) * bytes;
    rows[static_cast<size_t>(previous(d))] = row;
    receive(batch, previous(d), row, bytes);
  }
  for (int d = 1; d < size_; ++d) send(batch, next(d), buffer, bytes);
  wait(batch);
  reduce(rows, 0, bytes);
}

void Exchange::all_reduce(std::byte* buffer, int64_t elements, int64_t unit,
                          const std::function<ReduceRows(int64_t begin)>& reduce) {
  if (elements * unit <= kSmall) return reduce_small(buffer, elements * unit, reduce(0));
  std::vector<int64_t> cuts(static_cast<size_t>(size_) + 1);
  for (int r = 0; r <= size_; ++r) cuts[static_cast<size_t>(r)] = elements * r / size_ * unit;
  const int64_t begin = cuts[static_cast<size_t>(rank_)];
  // In place: a rank's own slice goes to nobody before it is reduced, and the others' are overwritten only after they
  // have been sent.
  reduce_scatter(buffer, cuts, unit, reduce(begin));
  all_gather(buffer, cuts);
}

void Exchange::broadcast(std::byte* buffer, int64_t bytes, int root) {
  Batch batch;
  if (rank_ == root) {
    for (int d = 1; d < size_; ++d) send(batch, next(d), buffer, bytes);
  } else {
    receive(batch, root, buffer, bytes);
  }
  wait(batch);
}

}  // namespace neap::comm::internal
