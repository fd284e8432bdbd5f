#include "neap/recompute/internal/environment.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "neap/base/error.h"

namespace neap::recompute::internal {

std::vector<c10::Device> devices_of(at::ArrayRef<at::Tensor> tensors, at::ArrayRef<c10::Device> more) {
  std::vector<c10::Device> devices = {c10::kCPU};
  const auto add = [&](c10::Device device) {
    if (device.is_cpu() || device.is_meta()) return;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  };
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) add(tensor.device());
  }
  for (const c10::Device device : more) add(device);
  // In one order for all regions: generators are leased one after the other.
  std::sort(devices.begin() + 1, devices.end(), [](c10::Device a, c10::Device b) {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  });
  return devices;
}

Autocast::Autocast(at::ArrayRef<c10::Device> devices) : cache_(at::autocast::is_autocast_cache_enabled()) {
  for (const c10::Device device : devices) {
    const c10::DeviceType type = device.type();
    if (std::any_of(types_.begin(), types_.end(), [&](const OfType& known) { return known.type == type; })) continue;
    types_.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
}

void Autocast::apply() const {
  for (const OfType& of : types_) {
    at::autocast::set_autocast_enabled(of.type, of.enabled);
    at::autocast::set_autocast_dtype(of.type, of.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_);
}

Environment::Environment(std::vector<c10::Device> devices) : devices_(std::move(devices)), autocast_(devices_) {
  for (const c10::Device device : devices_) {
    if (device.is_cpu()) continue;
    NEAP_CHECK(streams_.empty() || streams_.front().device_type() == device.type(),
               "[recompute] expected a region's tensors on the CPU and on devices of one more type; found ",
               streams_.front().device(), " and ", device, "; give each a region of its own");
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (!current_device_) current_device_ = guard.getDevice();
    streams_.push_back(guard.getStream(device));
  }
}

Environment::Streams::Streams(const Environment& environment) {
  if (!environment.current_device_) return;
  device_.emplace(*environment.current_device_);
  streams_.emplace(environment.streams_);
}

Environment::Modes::Modes(const Environment& environment) : grad_(true), before_(environment.devices_) {
  environment.autocast_.apply();
  at::autocast::increment_nesting();
}

Environment::Modes::~Modes() {
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  before_.apply();
}

}  // namespace neap::recompute::internal
