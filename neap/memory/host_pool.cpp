#include "neap/memory/host_pool.h"

#include <exception>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/device/copy.h"
#include "neap/memory/pool_core.h"
#include "neap/memory/slab_source.h"

namespace neap::memory {
namespace {

std::unique_ptr<SlabSource> make_source(const HostPool::Options& options) {
  if (!options.pin || options.device.is_cpu()) return std::make_unique<PageableSource>();
  return std::make_unique<PinnedSource>(options.device);
}

}  // namespace

HostBuffer::HostBuffer() noexcept = default;

HostBuffer::HostBuffer(std::shared_ptr<Core> core, const PoolBlock& block) noexcept
    : core_(std::move(core)), block_(block) {}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : core_(std::move(other.core_)),
      block_(std::exchange(other.block_, {})),
      pending_(std::exchange(other.pending_, {})) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  core_ = std::move(other.core_);
  block_ = std::exchange(other.block_, {});
  pending_ = std::exchange(other.pending_, {});
  return *this;
}

HostBuffer::~HostBuffer() { give_back(); }

bool HostBuffer::is_null() const noexcept { return block_.is_null(); }

Bytes HostBuffer::size() const noexcept { return Bytes(block_.requested); }

std::byte* HostBuffer::data() const noexcept { return block_.data; }

at::Tensor HostBuffer::tensor() const {
  const device::ByteSpan bytes = span();
  return device::byte_view(bytes.storage, bytes.offset, bytes.size);
}

device::ByteSpan HostBuffer::span() const {
  NEAP_ASSERT(!is_null(), "bytes of a host buffer that was released");
  const auto& slab = static_cast<const StorageSlab&>(*block_.memory);
  return {slab.storage(), block_.data - slab.data(), block_.requested};
}

void HostBuffer::set_pending(device::Event event) {
  NEAP_ASSERT(!is_null(), "copy of a host buffer that was released");
  pending_ = std::move(event);
}

const device::Event& HostBuffer::pending() const noexcept { return pending_; }

std::span<const std::byte> HostBuffer::read() const {
  NEAP_ASSERT(!is_null(), "read of a host buffer that was released");
  pending_.synchronize();
  return {block_.data, static_cast<size_t>(block_.requested)};
}

void HostBuffer::release_after(device::Event event) {
  set_pending(std::move(event));
  release();
}

void HostBuffer::release() {
  NEAP_ASSERT(!is_null(), "host buffer released twice");
  const auto core = std::move(core_);
  core->release(std::exchange(block_, {}), std::exchange(pending_, {}));
}

void HostBuffer::give_back() noexcept {
  if (is_null()) return;
  try {
    release();
  } catch (const std::exception& error) {
    log_error("[memory] host memory could not be given back: ", error.what());
  }
}

HostPool::HostPool(const Options& options) : HostPool(options, make_source(options)) {}

HostPool::HostPool(const Options& options, std::unique_ptr<SlabSource> source)
    : options_(options),
      core_(std::make_shared<PoolCore<device::Event>>(
          PoolOptions{
              .slab_size = options.slab_size, .cache_limit = options.cache_limit, .host_limit = options.host_limit},
          std::move(source))) {}

HostPool::~HostPool() = default;

std::optional<HostBuffer> HostPool::try_acquire(Bytes size) {
  const auto block = core_->try_acquire(size.count);
  if (!block) return std::nullopt;
  return HostBuffer(core_, *block);
}

HostBuffer HostPool::acquire(Bytes size) {
  if (auto buffer = try_acquire(size)) return std::move(*buffer);
  const auto now = counters();
  throw OutOfMemory(
      internal::concat("[memory] host memory for ", size, " was expected; ",
                       options_.host_limit ? "the limit is " + to_string(*options_.host_limit) : "the host has no more",
                       ", ", now.locked, " are locked (", now.in_flight, " in flight, ", now.idle, " idle, peak ",
                       now.locked_peak, "); raise host_limit or offload less"));
}

void HostPool::trim() { core_->trim(); }

PoolCounters HostPool::counters() const { return core_->counters(); }

void HostPool::reset_peaks() { core_->reset_peaks(); }

}  // namespace neap::memory
