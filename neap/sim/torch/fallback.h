// The kernel of every operator that sim does not implement itself: the CPU's, run on aliases of device memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace neap::sim {

// Boxed kernel for the PrivateUse1 key.
void cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace neap::sim
