#include "neap/checkpoint/internal/host_copies.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "neap/device/copy.h"
#include "neap/device/device.h"

namespace neap::checkpoint::internal {
namespace {

Bytes bytes_of(const Piece& piece) { return Bytes(static_cast<int64_t>(piece.data.nbytes())); }

std::unique_ptr<memory::HostPool> make_pool(const std::vector<Piece>& pieces, std::optional<Bytes> limit) {
  memory::HostPool::Options options;
  Bytes total;
  for (const Piece& piece : pieces) {
    total += bytes_of(piece);
    if (options.device.is_cpu()) options.device = piece.data.device();
  }
  options.slab_size = std::clamp(total, Bytes(memory::kGranularity), options.slab_size);
  options.cache_limit = Bytes(int64_t{1} << 60);  // no limit: all is needed again by the next save
  options.host_limit = limit;
  return std::make_unique<memory::HostPool>(options);
}

// The out-streams of the devices of one save: copies on them begin after what is enqueued now.
class OutStreams {
 public:
  void copy(const at::Tensor& host, const at::Tensor& data) {
    device::Device& device = device::Device::of(data);
    const auto [found, is_new] = streams_.try_emplace(&device, device.copy_stream(device::Direction::kOut));
    if (is_new) found->second.wait(device.current_stream().record());
    const int64_t begin = data.storage_offset() * static_cast<int64_t>(data.element_size());
    device::copy_bytes_async(host, device::byte_view(data.storage(), begin, static_cast<int64_t>(data.nbytes())),
                             found->second);
  }

  // What the run does to the tensors from here on comes after the copies. Of each device the end of its copies.
  std::map<device::Device*, device::Event> finish() {
    std::map<device::Device*, device::Event> ends;
    for (const auto& [device, stream] : streams_) {
      const device::Event& end = ends.emplace(device, stream.record()).first->second;
      device->current_stream().wait(end);
    }
    return ends;
  }

  void synchronize() {
    for (const auto& [device, stream] : streams_) stream.synchronize();
  }

 private:
  std::map<device::Device*, device::Stream> streams_;
};

}  // namespace

// The largest first: they find the blocks of the save before, and small ones share what is left as they did then.
std::optional<std::vector<memory::HostBuffer>> HostCopies::acquire(const std::vector<Piece>& pieces) {
  std::vector<std::size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater{}, [&](std::size_t i) { return bytes_of(pieces[i]); });
  std::vector<memory::HostBuffer> buffers(pieces.size());
  for (const std::size_t i : order) {
    if (bytes_of(pieces[i]) == Bytes(0)) continue;
    auto buffer = pool_->try_acquire(bytes_of(pieces[i]));
    if (!buffer) return std::nullopt;
    buffers[i] = std::move(*buffer);
  }
  return buffers;
}

std::optional<std::vector<memory::HostBuffer>> HostCopies::take(std::vector<Piece>& pieces) {
  if (!pool_) pool_ = make_pool(pieces, limit_);
  auto buffers = acquire(pieces);
  if (!buffers) return std::nullopt;
  OutStreams streams;
  try {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (!(*buffers)[i].is_null()) streams.copy((*buffers)[i].tensor(), pieces[i].data);
    }
  } catch (...) {
    streams.synchronize();  // before the blocks go back
    throw;
  }
  const auto ends = streams.finish();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    at::Tensor& data = pieces[i].data;
    memory::HostBuffer& buffer = (*buffers)[i];
    if (buffer.is_null()) {
      data = at::empty({0}, data.options().device(at::kCPU).requires_grad(false));
      continue;
    }
    buffer.set_pending(ends.at(&device::Device::of(data)));
    data = buffer.tensor().view(data.scalar_type());
  }
  return buffers;
}

}  // namespace neap::checkpoint::internal
