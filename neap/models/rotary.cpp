#include "neap/models/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
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

// The dimension whose frequency turns `turns` times within the original length.
double dimension_that_turns(double turns, const ModelConfig& config) {
  const auto original = static_cast<double>(config.rope_scaling.original_max_position_embeddings);
  return static_cast<double>(config.head_dim) * std::log(original / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(config.rope_theta));
}

at::Tensor scale_yarn(const at::Tensor& frequencies, const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  double low = dimension_that_turns(scaling.beta_fast, config);
  double high = dimension_that_turns(scaling.beta_slow, config);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.head_dim - 1));
  if (low == high) high += 0.001;  // a step; as transformers has it
  const at::Tensor stretch =
      at::arange(frequencies.numel(), frequencies.options()).sub_(low).div_(high - low).clamp_(0, 1);
  return frequencies / scaling.factor * stretch + frequencies * (1 - stretch);
}

}  // namespace

at::Tensor rotary_frequencies(const ModelConfig& config) {
  const at::Tensor exponent = at::arange(0, config.head_dim, 2, at::TensorOptions(at::kFloat)) / config.head_dim;
  const at::Tensor frequencies = at::pow(config.rope_theta, exponent).reciprocal();
  switch (config.rope_scaling.type) {
    case RopeScaling::Type::kDefault:
      return frequencies;
    case RopeScaling::Type::kLinear:
      return frequencies / config.rope_scaling.factor;
    case RopeScaling::Type::kLlama3:
      return scale_llama3(frequencies, config.rope_scaling);
    case RopeScaling::Type::kYarn:
      return scale_yarn(frequencies, config);
  }
  NEAP_ASSERT(false, "rope type");
}

RotaryTables rotary_tables(const at::Tensor& frequencies, int64_t sequence, at::ScalarType dtype, double factor) {
  return rotary_tables(frequencies, at::arange(sequence, frequencies.options()), dtype, factor);
}

RotaryTables rotary_tables(const at::Tensor& frequencies, const at::Tensor& positions, at::ScalarType dtype,
                           double factor) {
  const at::Tensor angles = positions.to(frequencies.scalar_type()).unsqueeze(-1) * frequencies;
  at::Tensor cos = angles.cos(), sin = angles.sin();
  if (factor != 1.0) {
    cos.mul_(factor);
    sin.mul_(factor);
  }
  return {cos.to(dtype), sin.to(dtype)};
}

}  // namespace neap::models
