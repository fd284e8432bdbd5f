#include "neap/sim/torch/backend.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include "neap/base/error.h"
#include "neap/sim/torch/device_allocator.h"
#include "neap/sim/torch/fallback.h"
#include "neap/sim/torch/host_allocator.h"

namespace neap::sim {
namespace {

// Autograd orders its streams by the one accelerator of the process, and PrivateUse1 wins over the others: beside a
// real device, sim would silently turn off that device's stream handling in backward.
void refuse_other_accelerators() {
  NEAP_CHECK(!c10::is_privateuse1_backend_registered(), "sim: this process already has the PrivateUse1 device '",
             c10::get_privateuse1_backend(), "'; torch allows one. Run the simulated device in a process of its own");
  for (const auto type : {c10::kCUDA, c10::kHIP, c10::kXPU, c10::kMPS, c10::kMTIA, c10::kHPU}) {
    if (!c10::impl::hasDeviceGuardImpl(type)) continue;
    const int count = c10::impl::getDeviceGuardImpl(type)->deviceCount();
    NEAP_CHECK(count == 0, "sim: this process can use ", count, " ", c10::DeviceTypeName(type, /*lower_case=*/true),
               " device(s); torch serves one accelerator per process. Hide them (for CUDA: CUDA_VISIBLE_DEVICES=\"\") "
               "or train on them instead (device.type)");
  }
}

void register_kernels() {
  using torch::Library;
  // Kernels stay registered for the life of the process, so these are never destroyed.
  static auto& aten = *new Library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  register_factories(aten);
  register_copies(aten);
  register_attention(aten);
  register_convolution(aten);
  register_random(aten);
  register_composites(aten);
  static auto& all = *new Library(Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_kernel>());

  // Our copies handle the lazy conj and neg bits. Without these two the conj fallback calls clone(), which calls
  // _copy_from, which calls the conj fallback … until the stack overflows.
  static auto& conjugate = *new Library(Library::IMPL, "aten", c10::DispatchKey::Conjugate, __FILE__, __LINE__);
  static auto& negative = *new Library(Library::IMPL, "aten", c10::DispatchKey::Negative, __FILE__, __LINE__);
  for (auto* lazy : {&conjugate, &negative}) lazy->impl("_copy_from", torch::CppFunction::makeFallthrough());

  static auto& autocast =
      *new Library(Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  register_autocast(autocast);
  static auto& no_cast = *new Library(Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  no_cast.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

Engine& engine() {
  static auto* engine = new Engine;
  return *engine;
}

int device_index(c10::Device device) {
  const int index = device.has_index() ? device.index() : Engine::current_device();
  TORCH_CHECK(index >= 0 && index < engine().device_count(), "sim has ", engine().device_count(),
              " device(s); there is no sim:", index);
  return index;
}

void register_backend() {
  static std::once_flag once;
  std::call_once(once, [] {  // an exception leaves the flag unset: the next call refuses again
    refuse_other_accelerators();
    c10::register_privateuse1_backend("sim");
    register_hooks();
    register_guard();
    c10::SetAllocator(kSim, &device_allocator());
    at::setHostAllocator(kSim, &host_allocator());
    register_kernels();
    // Workers must not run into the destruction of static objects. A process that was forked off has none.
    static const pid_t process = ::getpid();
    std::atexit([] {
      if (::getpid() == process) engine().stop_workers();
    });
  });
}

}  // namespace neap::sim
