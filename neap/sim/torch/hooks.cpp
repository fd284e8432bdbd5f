// What ATen asks an accelerator about itself: devices, pinned memory, generators, growing storages.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/device_allocator.h"
#include "neap/sim/torch/generator.h"
#include "neap/sim/torch/host_allocator.h"

namespace neap::sim {
namespace {

using c10::DeviceIndex;

int index_or_current(DeviceIndex device) { return device < 0 ? Engine::current_device() : device; }

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Autograd synchronises only devices that have one; ours need no setting up.
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  void init() const override {}

  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(engine().device_count()); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(Engine::current_device()); }
  void setCurrentDevice(DeviceIndex device) const override { exchangeDevice(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    if (device < 0) return device;  // as CUDA: nothing to change
    return static_cast<DeviceIndex>(Engine::exchange_device(device_index(sim_device(device))));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }

  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  bool isPinnedPtr(const void* data) const override { return engine().find_pinned(data) != nullptr; }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = engine().find_device(data);
    TORCH_CHECK(device >= 0, "the address does not lie in sim's memory");
    return sim_device(device);
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device_index(sim_device(index_or_current(device))));
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator(device_index(sim_device(index_or_current(device))));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }  // leaked: ATen keeps the pointer

}  // namespace neap::sim
