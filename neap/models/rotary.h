// Frequencies of the rotary position embedding, and their tables for one forward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "neap/models/functions.h"
#include "neap/models/model_config.h"

namespace neap::models {

// One float32 frequency per pair of a head's elements, [head_dim / 2] on the CPU, after scaling.
at::Tensor rotary_frequencies(const ModelConfig& config);

// cos and sin of the angles times `factor` (RopeScaling::table_factor()), computed in float32 and rounded to `dtype`
// last. `frequencies` are on the device the tables shall be on.
RotaryTables rotary_tables(const at::Tensor& frequencies, int64_t sequence, at::ScalarType dtype, double factor = 1.0);
// The same for given positions, of any shape; the tables have a dimension more.
RotaryTables rotary_tables(const at::Tensor& frequencies, const at::Tensor& positions, at::ScalarType dtype,
                           double factor = 1.0);

}  // namespace neap::models
