// Operators that draw random numbers but take no generator. The CPU's kernel would draw from the CPU's own; here they
// are the same arithmetic over a draw that does take one, so that the device's generator is the only one that moves.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "neap/sim/torch/backend.h"

namespace neap::sim {
namespace {

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double probability,
                                                  std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (input.numel() == 0) return {input, at::empty_like(input, mask_options)};
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, mask_options)};
  const double kept = 1 - probability;
  // Named, because gcc takes a temporary optional for uninitialised when it instruments for sanitizers.
  const std::optional<at::Generator> own_generator = std::nullopt;
  auto mask = at::empty_like(input, mask_options).bernoulli_(kept, own_generator);
  auto output = input.mul(mask).mul_(kept == 0 ? 0.0 : 1 / kept);
  return {output, mask};
}

}  // namespace

void register_random(torch::Library& aten) { aten.impl("native_dropout", &native_dropout); }

}  // namespace neap::sim
