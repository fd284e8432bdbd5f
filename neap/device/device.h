// One device of any type torch knows: its streams, memory numbers and clock. Start here.
//
// Written on c10's device-generic guard and allocator interfaces, so CUDA, XPU, NPU and every PrivateUse1 backend take
// the same path; a plain CPU gets the null implementation: one stream without a queue, null events, copies that are
// done when they return. The type always comes from the tensor at hand, never from at::getAccelerator(), which answers
// differently once a PrivateUse1 backend is registered.
//
// Device::of() is the registry: an entry is made on first use and lives as long as the process. Thread-safe.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "neap/base/bytes.h"
#include "neap/base/mutex.h"
#include "neap/device/stream.h"

namespace at {
class Tensor;
class TensorBase;
}  // namespace at
namespace c10 {
class DataPtr;
}

namespace neap::device {

namespace internal {
class EventPool;
inline constexpr size_t kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);
}  // namespace internal

enum class Direction { kOut, kIn };  // device → host, host → device

// As the device's own allocator counts them. `allocated` is what tensors hold, `reserved` what was taken from the
// driver.
struct MemoryStats {
  Bytes allocated, allocated_peak;
  Bytes reserved, reserved_peak;
  int64_t out_of_memory = 0;  // how often an allocation failed

  bool operator==(const MemoryStats&) const = default;
};

struct Capacity {
  Bytes free, total;

  bool operator==(const Capacity&) const = default;
};

struct ByteSpan;  // copy.h

struct Copy {
  Direction direction;
  Bytes bytes;
};

class Device {
 public:
  // An index that is missing means the current device of that type. UserError when torch has no such device type here.
  static Device& of(c10::Device device);
  static Device& of(const at::TensorBase& tensor);

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] c10::Device c10_device() const noexcept { return device_; }
  // False when work is done as soon as it is enqueued (plain CPU): copies cannot overlap anything.
  [[nodiscard]] bool asynchronous() const noexcept { return asynchronous_; }

  // The calling thread's current stream of this device.
  [[nodiscard]] Stream current_stream();
  // The stream on which all copies of one direction run, the same for every caller: taken from the backend's pool at
  // the first use and kept, because the memory that a short-lived stream leaves in a caching allocator is stranded
  // there.
  [[nodiscard]] Stream copy_stream(Direction direction);
  // The same for collectives: one stream, so that all ranks run them in the order of the calls.
  [[nodiscard]] Stream collective_stream();
  [[nodiscard]] Stream wrap(c10::Stream stream);

  // Blocks until all work of all streams is done.
  void synchronize();

  // Tells the device's allocator that `stream` uses the memory: when the last owner lets go, the memory is given out
  // again only after the work enqueued on `stream` at that moment. REQUIRES: the memory is of this device.
  void record_on_stream(const c10::DataPtr& memory, const Stream& stream);

  // Empty where the backend counts nothing (plain CPU, a device not used yet).
  [[nodiscard]] std::optional<MemoryStats> memory_stats() const;
  [[nodiscard]] std::optional<Capacity> capacity() const;
  // Starts new peaks at the present level.
  void reset_peak();

  // How many events the driver was asked for so far; constant in a steady run.
  [[nodiscard]] int64_t driver_events() const noexcept;

  // Nanoseconds on this device's clock (set_clock), else on the host's steady clock.
  [[nodiscard]] int64_t now_ns() const;

  // Called before each copy of copy_bytes_async(); what it throws takes the place of the copy, which is how tests fail
  // one on purpose. Returns the former hook; an empty one ends it. Set it while no copy is being made.
  using CopyHook = std::function<void(const Copy&)>;
  CopyHook set_copy_hook(CopyHook hook);

 private:
  friend class Stream;
  friend void copy_bytes_async(const at::Tensor&, const at::Tensor&, const Stream&);
  friend void copy_bytes_async(const ByteSpan&, const ByteSpan&, const Stream&);
  void announce(const Copy& copy) const {
    if (has_copy_hook_.load(std::memory_order_acquire)) copy_hook_(copy);
  }
  explicit Device(c10::Device device);
  ~Device() = delete;  // leaked on purpose: events and streams may outlive every static
  Stream kept_stream(size_t which);

  const c10::Device device_;
  const bool asynchronous_;
  internal::EventPool& events_;
  Mutex mutex_;
  std::optional<c10::Stream> kept_streams_[3] NEAP_GUARDED_BY(mutex_);  // one per Direction, then the collectives'
  std::atomic<bool> has_copy_hook_ = false;
  CopyHook copy_hook_;
};

// Gives every device of a type a clock of its own (a simulated device has one). An empty function restores the steady
// clock. The function is called from any thread. Thread-safe.
using Clock = std::function<int64_t(c10::DeviceIndex)>;
void set_clock(c10::DeviceType type, Clock clock);

}  // namespace neap::device
