// Operators for which the dispatcher would prefer a composite implementation to the fallback although the CPU has a
// kernel of its own. The composite's arithmetic differs in the last bits, so these are pinned to the CPU's kernel.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/fallback.h"

namespace neap::sim {
namespace {

// The CPU's kernel counts floating point alone; of other accelerators programs know that they count integers.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  const bool whole = c10::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  const at::Tensor values = whole ? self.to(at::kDouble) : self;
  at::Tensor counts = at::empty({bins}, values.options());
  at::histc_out(counts, values, bins, min, max);
  return whole ? counts.to(self.scalar_type()) : counts;
}

}  // namespace

void register_composites(torch::Library& aten) {
  for (const char* op : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr", "addr.out",
                         "linalg__powsum", "_stack", "_stack.out", "native_channel_shuffle", "all.dims", "all.dims_out",
                         "any.dims", "any.dims_out"}) {
    aten.impl(op, torch::CppFunction::makeFromBoxedFunction<&cpu_kernel>());
  }
  aten.impl("histc", &histc);
}

}  // namespace neap::sim
