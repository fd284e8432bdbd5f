#include "neap/memory/host_register.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <memory>

#include "neap/base/log.h"

namespace neap::memory {
namespace {

struct Names {
  c10::DeviceType type;
  const char* lock;
  const char* unlock;
  const char* clear_error;
};

// torch's ROCm builds call their devices CUDA.
constexpr Names kNames[] = {
    {c10::DeviceType::CUDA, "cudaHostRegister", "cudaHostUnregister", "cudaGetLastError"},
    {c10::DeviceType::CUDA, "hipHostRegister", "hipHostUnregister", "hipGetLastError"},
};

constexpr unsigned kPortable = 1;  // locked for every device, not only for the current one

template <class Function>
bool look_up(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

struct LockedPages {
  void* memory;
  size_t bytes;
  HostRegister functions;

  ~LockedPages() {
    if (functions.unlock(memory) != 0) {
      functions.clear_error();
      log_error("[memory] host memory could not be unlocked; it is kept until the process ends");
      return;  // the device may still map it
    }
    munmap(memory, bytes);
  }
};

void free_locked(void* context) { delete static_cast<LockedPages*>(context); }

}  // namespace

std::optional<HostRegister> find_host_register(c10::DeviceType type) {
  for (const auto& names : kNames) {
    HostRegister found;
    if (names.type == type && look_up(found.lock, names.lock) && look_up(found.unlock, names.unlock) &&
        look_up(found.clear_error, names.clear_error)) {
      return found;
    }
  }
  return std::nullopt;
}

c10::DataPtr allocate_locked(const HostRegister& functions, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  madvise(memory, size, MADV_HUGEPAGE);  // a wish: fewer faults while locking
  if (functions.lock(memory, size, kPortable) != 0) {
    functions.clear_error();
    munmap(memory, size);
    return {};
  }
  return {memory, new LockedPages{memory, size, functions}, &free_locked, c10::kCPU};
}

}  // namespace neap::memory
