// Autocast on sim: the operator lists that ATen gives to every accelerator (CUDA, XPU, MTIA register the same ones), so
// that a mixed-precision model runs the same casts on sim as it will on a real device.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "neap/sim/torch/backend.h"

namespace neap::sim {
namespace {

// The names that ATen's list of redispatched signatures uses unqualified.
using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using c10::Scalar;

at::Tensor binary_cross_entropy_banned(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                       int64_t) {
  TORCH_CHECK(false,
              "binary_cross_entropy is unsafe to autocast: its input, a probability, has left the range that "
              "the lower precision resolves. Use binary_cross_entropy_with_logits.");
}

}  // namespace

void register_autocast(torch::Library& m) {
#define NEAP_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define NEAP_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define NEAP_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define NEAP_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(NEAP_LOWER_PRECISION)
  AT_FORALL_FP32(NEAP_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(NEAP_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(NEAP_PROMOTE)
  KERNEL_PRIVATEUSEONE(cat, promote)
  KERNEL_PRIVATEUSEONE(stack, promote)
#undef NEAP_LOWER_PRECISION
#undef NEAP_FP32
#undef NEAP_FP32_SET_OPT_DTYPE
#undef NEAP_PROMOTE
  m.impl("binary_cross_entropy", &binary_cross_entropy_banned);
}

}  // namespace neap::sim
