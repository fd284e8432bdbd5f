#include <torch/csrc/distributed/c10d/Store.hpp>

#include "neap/base/error.h"
#include "neap/comm/cuda/nccl_group.h"

namespace neap::comm::cuda {

bool has_nccl() noexcept { return false; }

std::unique_ptr<internal::DeviceGroup> connect_nccl(const c10::intrusive_ptr<c10d::Store>& /*store*/, int /*rank*/,
                                                    int /*size*/, std::chrono::milliseconds /*timeout*/) {
  NEAP_ASSERT(false, "a build without NCCL was asked for it");
}

}  // namespace neap::comm::cuda
