// Devices, streams and events as c10 asks for them, on the engine's.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/device_allocator.h"

namespace neap::sim {
namespace {

using c10::Device;
using c10::DeviceIndex;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }

  // ---- devices
  Device exchangeDevice(Device device) const override {
    return sim_device(Engine::exchange_device(device_index(device)));
  }
  Device getDevice() const override { return sim_device(Engine::current_device()); }
  void setDevice(Device device) const override { Engine::exchange_device(device_index(device)); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) Engine::exchange_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(engine().device_count()); }
  void synchronizeDevice(const DeviceIndex device) const override { engine().synchronize_device(device); }

  // ---- streams
  c10::Stream getStream(Device device) const override {
    return torch_stream(engine().current_stream(device_index(device)));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return torch_stream(engine().stream(device_index(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return torch_stream(engine().pool_stream(device_index(device), high_priority));
  }
  c10::Stream getNewStream(Device device, int /*priority*/) const override {
    return torch_stream(engine().new_stream(device_index(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = device_index(stream.device());
    const int former = Engine::exchange_stream(device, static_cast<int>(stream.id()));
    return torch_stream(engine().stream(device, former));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return engine_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return engine().query(engine_stream(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { engine().synchronize(engine_stream(stream)); }
  // Autograd asks when producer and consumer streams differ.
  bool isStreamCapturing(const c10::Stream& /*stream*/) const override { return false; }

  // ---- events. c10 keeps them behind void*, made at the first record.
  void record(void** event, const c10::Stream& stream, const DeviceIndex device,
              const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of sim:", static_cast<int>(device),
                " cannot be recorded on a stream of sim:", static_cast<int>(stream.device_index()));
    if (!*event) *event = new Event;
    engine().record(event_of(*event), engine_stream(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) engine().wait(engine_stream(stream), event_of(event));
  }
  bool queryEvent(void* event) const override { return !event || engine().query(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) engine().synchronize(event_of(event));
  }
  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex /*device*/) const override {
    TORCH_CHECK(from && to, "elapsed time needs two events that have been recorded");
    return engine().elapsed_ms(event_of(from), event_of(to));
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }

 private:
  static Event& event_of(void* event) { return *static_cast<Event*>(event); }
};

}  // namespace

void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kSim, new Guard);  // leaked, as c10 asks
}

}  // namespace neap::sim
