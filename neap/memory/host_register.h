// Page-locking memory that is already there, at its exact size.
//
// torch has no device-generic call for it, so the backend's own functions are looked up by name among the libraries
// that are loaded: no vendor header, and nothing to link. Where there are none, torch's pinned allocator is used.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace neap::memory {

// The functions of one backend; the form is common to CUDA and HIP. All return 0 on success.
struct HostRegister {
  int (*lock)(void* memory, size_t bytes, unsigned flags) = nullptr;
  int (*unlock)(void* memory) = nullptr;
  // Takes back the error that a failed call leaves for the next one to find.
  int (*clear_error)() = nullptr;
};

// Empty when the backend has none, or its libraries are not loaded.
std::optional<HostRegister> find_host_register(c10::DeviceType type);

// Fresh pages, locked on every device of the backend; unlocked and freed by the DataPtr. Null memory when there are no
// pages or they could not be locked. Takes as long as touching every page does.
c10::DataPtr allocate_locked(const HostRegister& functions, int64_t bytes);

}  // namespace neap::memory
