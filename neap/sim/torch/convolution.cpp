// Convolutions: ATen routes those of a device outside ATen to the "overrideable" pair.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/cpu_call.h"

namespace neap::sim {
namespace {

using at::Tensor;
constexpr auto kRead = OpPlan::Use::kReads;

// Each element of the weight meets each position of the side that convolution does not spread over: the output, or
// the input of a transposed one.
double flops(const Tensor& spread, const Tensor& weight) {
  const double positions = spread.numel() / static_cast<double>(std::max<int64_t>(spread.size(1), 1));
  return 2 * positions * static_cast<double>(weight.numel());
}

Tensor convolve(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                int64_t groups) {
  CpuCall call("aten::convolution_overrideable");
  const auto x = call.alias(input, kRead), w = call.alias(weight, kRead);
  const auto b = bias ? std::optional(call.alias(*bias, kRead)) : std::nullopt;
  call.begin();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto output = at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups);
  call.produced(output);
  call.finish(flops(transposed ? input : output, weight));
  return call.result(output);
}

std::tuple<Tensor, Tensor, Tensor> convolve_backward(const Tensor& grad_output, const Tensor& input,
                                                     const Tensor& weight, at::IntArrayRef stride,
                                                     at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                     at::IntArrayRef output_padding, int64_t groups,
                                                     std::array<bool, 3> wanted) {
  CpuCall call("aten::convolution_backward_overrideable");
  const auto g = call.alias(grad_output, kRead), x = call.alias(input, kRead), w = call.alias(weight, kRead);
  call.begin();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t channels = grad_output.size(1);
  const auto [gx, gw, gb] = at::convolution_backward(g, x, w, at::IntArrayRef(channels), stride, padding, dilation,
                                                     transposed, output_padding, groups, wanted);
  for (const auto& grad : {gx, gw, gb}) call.produced(grad);
  call.finish((wanted[0] + wanted[1]) * flops(transposed ? input : grad_output, weight));
  return {call.result(gx), call.result(gw), call.result(gb)};
}

}  // namespace

void register_convolution(torch::Library& aten) {
  aten.impl("convolution_overrideable", &convolve);
  aten.impl("convolution_backward_overrideable", &convolve_backward);
}

}  // namespace neap::sim
