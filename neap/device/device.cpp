#include "neap/device/device.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <chrono>
#include <utility>

#include "neap/base/error.h"
#include "neap/device/event_pool.h"

namespace neap::device {
namespace {

using c10::impl::VirtualGuardImpl;

constexpr size_t kIndices = 128;  // c10::DeviceIndex is an int8_t

// One cell per possible device: of() is on the path of every saved tensor, so a known device costs one load.
std::array<std::array<std::atomic<Device*>, kIndices>, internal::kTypes>& registry() {
  static auto* cells = new std::array<std::array<std::atomic<Device*>, kIndices>, internal::kTypes>{};
  return *cells;
}

// Meta tensors have no bytes; like the CPU's, their streams and events exist in name only.
bool has_queues(c10::DeviceType type) { return type != c10::kCPU && type != c10::kMeta; }

c10::Device with_index(c10::Device device) {
  if (!has_queues(device.type())) return {device.type(), 0};
  NEAP_CHECK(c10::impl::hasDeviceGuardImpl(device.type()), "[device] ", device,
             " is a device type that torch can use in this process; none is registered; load its backend first");
  return device.has_index() ? device : VirtualGuardImpl(device.type()).getDevice();
}

// Null for backends whose allocator counts nothing, and before the device is first used: asking then is an error.
c10::DeviceAllocator* counting_allocator(c10::DeviceType type) {
  if (!has_queues(type)) return nullptr;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

Bytes bytes(int64_t count) { return Bytes(count); }

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Clocks {
  Mutex mutex;
  std::array<std::shared_ptr<const Clock>, internal::kTypes> of_type NEAP_GUARDED_BY(mutex);
  std::array<std::atomic<bool>, internal::kTypes> is_set{};  // spares the lock where there is no clock
};

Clocks& clocks() {
  static auto* all = new Clocks;
  return *all;
}

}  // namespace

Device::Device(c10::Device device)
    : device_(device), asynchronous_(has_queues(device.type())), events_(*new internal::EventPool(device.type())) {}

Device& Device::of(c10::Device device) {
  if (!device.has_index() || !has_queues(device.type())) device = with_index(device);
  auto& cell = registry()[static_cast<size_t>(device.type())][static_cast<size_t>(device.index())];
  if (Device* known = cell.load(std::memory_order_acquire)) return *known;

  device = with_index(device);  // checks that the type is there
  static Mutex making;
  MutexLock lock(making);
  if (Device* known = cell.load(std::memory_order_acquire)) return *known;
  auto* made = new Device(device);
  cell.store(made, std::memory_order_release);
  return *made;
}

Device& Device::of(const at::TensorBase& tensor) { return of(tensor.device()); }

Stream Device::current_stream() {
  if (!asynchronous_) return wrap(c10::Stream(c10::Stream::DEFAULT, device_));
  return wrap(VirtualGuardImpl(device_.type()).getStream(device_));
}

Stream Device::copy_stream(Direction direction) { return kept_stream(static_cast<size_t>(direction)); }

Stream Device::collective_stream() { return kept_stream(2); }

Stream Device::kept_stream(size_t which) {
  if (!asynchronous_) return current_stream();
  MutexLock lock(mutex_);
  auto& kept = kept_streams_[which];
  if (!kept) kept = VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
  return wrap(*kept);
}

Stream Device::wrap(c10::Stream stream) {
  NEAP_ASSERT(stream.device() == device_, "stream of ", stream.device(), " used as one of ", device_);
  return Stream(*this, stream);
}

void Device::synchronize() {
  if (asynchronous_) VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
}

void Device::record_on_stream(const c10::DataPtr& memory, const Stream& stream) {
  if (asynchronous_) VirtualGuardImpl(device_.type()).recordDataPtrOnStream(memory, stream.unwrap());
}

std::optional<MemoryStats> Device::memory_stats() const {
  auto* allocator = counting_allocator(device_.type());
  if (allocator == nullptr) return std::nullopt;
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator->getDeviceStats(device_.index());
  const auto& allocated = stats.allocated_bytes[kAll];
  const auto& reserved = stats.reserved_bytes[kAll];
  return MemoryStats{.allocated = bytes(allocated.current),
                     .allocated_peak = bytes(allocated.peak),
                     .reserved = bytes(reserved.current),
                     .reserved_peak = bytes(reserved.peak),
                     .out_of_memory = stats.num_ooms};
}

std::optional<Capacity> Device::capacity() const {
  auto* allocator = counting_allocator(device_.type());
  if (allocator == nullptr) return std::nullopt;
  try {
    const auto [free, total] = allocator->getMemoryInfo(device_.index());
    return Capacity{bytes(static_cast<int64_t>(free)), bytes(static_cast<int64_t>(total))};
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
}

void Device::reset_peak() {
  if (auto* allocator = counting_allocator(device_.type())) allocator->resetPeakStats(device_.index());
}

int64_t Device::driver_events() const noexcept { return events_.created(); }

int64_t Device::now_ns() const {
  auto& all = clocks();
  const auto type = static_cast<size_t>(device_.type());
  if (!all.is_set[type].load(std::memory_order_acquire)) return steady_ns();
  std::shared_ptr<const Clock> clock;
  {
    MutexLock lock(all.mutex);
    clock = all.of_type[type];
  }
  return clock != nullptr ? (*clock)(device_.index()) : steady_ns();
}

Device::CopyHook Device::set_copy_hook(CopyHook hook) {
  has_copy_hook_.store(hook != nullptr, std::memory_order_release);
  return std::exchange(copy_hook_, std::move(hook));
}

void set_clock(c10::DeviceType type, Clock clock) {
  auto& all = clocks();
  const auto at = static_cast<size_t>(type);
  MutexLock lock(all.mutex);
  all.is_set[at].store(clock != nullptr, std::memory_order_release);
  all.of_type[at] = clock ? std::make_shared<const Clock>(std::move(clock)) : nullptr;
}

}  // namespace neap::device
