// Ranks whose tensors are on CUDA devices: c10d's ProcessGroupNCCL behind DeviceGroup.
//
// Compiled where the installed torch has NCCL and its headers lie beside it (CMakeLists.txt says how that is found);
// no_nccl.cpp takes its place elsewhere and says so. It has been compiled, never run: docs/decisions/0009-nccl.md.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "neap/comm/internal/device_group.h"

namespace c10d {
class Store;
}

namespace neap::comm::cuda {

// False: this build has no NCCL.
[[nodiscard]] bool has_nccl() noexcept;

// The communicator itself is made by the first collective, which waits for the other members. REQUIRES: has_nccl()
std::unique_ptr<internal::DeviceGroup> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace neap::comm::cuda
