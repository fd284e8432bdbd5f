#include "neap/models/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>

#include <numbers>

#include "neap/base/error.h"

namespace neap::models {
namespace {

at::Tensor scale_llama3(const at::Tensor& frequencies, const RopeScaling& scaling) {
  const auto original = static_cast<double>(scaling.original_max_position_embeddings);
  const double low = scaling.low_freq_factor;
  const double high = scaling.high_freq_factor;
  const at::Tensor wavelength = frequencies.reciprocal().mul(2 * std::numbers::pi);
  const at::Tensor stretched = frequencies / scaling.factor;
  // 1 keeps a frequency, 0 stretches it fully.
  const at::Tensor keep = wavelength.reciprocal().mul(original).sub(low).div(high - low);
  const at::Tensor blended = (1 - keep) * stretched + keep * frequencies;
  return at::where(wavelength.lt(original / high), frequencies,
                   at::where(wavelength.gt(original / low), stretched, blended));
}

}  // namespace

at::Tensor rotary_frequencies(const LlamaConfig& config) {
  const at::Tensor exponent = at::arange(0, config.head_dim, 2, at::TensorOptions(at::kFloat)) / config.head_dim;
  const at::Tensor frequencies = at::pow(config.rope_theta, exponent).reciprocal();
  switch (config.rope_scaling.type) {
    case RopeScaling::Type::kDefault:
      return frequencies;
    case RopeScaling::Type::kLinear:
      return frequencies / config.rope_scaling.factor;
    case RopeScaling::Type::kLlama3:
      return scale_llama3(frequencies, config.rope_scaling);
  }
  NEAP_ASSERT(false, "rope type");
}

RotaryTables rotary_tables(const at::Tensor& frequencies, int64_t sequence, at::ScalarType dtype) {
  const at::Tensor angles = at::outer(at::arange(sequence, frequencies.options()), frequencies);
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

}  // namespace neap::models
