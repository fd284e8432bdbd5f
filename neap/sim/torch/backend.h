// The parts of the torch side of sim that its files share. Internal: nothing outside neap/sim/torch includes it.
//
// Everything is registered by register_backend(), not by static initialisers: loading the library changes nothing in
// the process, and a process in which another accelerator is available can be refused with an exception.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "neap/sim/engine/engine.h"

namespace torch {
class Library;
}

namespace neap::sim {

inline constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

inline c10::Device sim_device(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }
inline bool on_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }

// The engine behind the device. Made on first use and never destroyed: tensors may outlive every static object.
Engine& engine();

// The index of a sim device, the current one when the device names none; throws when it is out of range.
int device_index(c10::Device device);

inline c10::Stream torch_stream(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, sim_device(stream->device()), stream->id());
}
inline Stream* engine_stream(const c10::Stream& stream) {
  return engine().stream(stream.device_index(), static_cast<int>(stream.id()));
}
// Of the calling thread, on the tensor's device.
inline Stream* current_stream(const at::Tensor& tensor) { return engine().current_stream(tensor.device().index()); }

// Registers the device once in the process. Throws UserError where another accelerator is available.
void register_backend();

// One function per file, called by register_backend().
void register_guard();
void register_hooks();
void register_factories(torch::Library& aten);
void register_copies(torch::Library& aten);
void register_attention(torch::Library& aten);
void register_convolution(torch::Library& aten);
void register_random(torch::Library& aten);
void register_composites(torch::Library& aten);
void register_autocast(torch::Library& aten);

}  // namespace neap::sim
