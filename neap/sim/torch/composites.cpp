// Operators for which the dispatcher would prefer a composite implementation to the fallback although the CPU has a
// kernel of its own. The composite's arithmetic differs in the last bits, so these are pinned to the CPU's kernel.
#include <torch/library.h>

#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/fallback.h"

namespace neap::sim {

void register_composites(torch::Library& aten) {
  for (const char* op : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr", "addr.out",
                         "linalg__powsum", "_stack", "_stack.out", "native_channel_shuffle", "all.dims", "all.dims_out",
                         "any.dims", "any.dims_out"}) {
    aten.impl(op, torch::CppFunction::makeFromBoxedFunction<&cpu_kernel>());
  }
}

}  // namespace neap::sim
