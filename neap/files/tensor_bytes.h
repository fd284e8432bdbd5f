// What bytes of a safetensors file are to torch, and the other way round.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <span>

#include "neap/files/safetensors.h"

namespace neap::files {

at::ScalarType to_torch(SafeType type);
// UserError for what such a file cannot hold: complex and quantised types.
SafeType to_safe(at::ScalarType type);

// A CPU tensor over the bytes, valid as long as they are; a copy of them where they are not aligned for their type.
// For reading only. REQUIRES: as many bytes as the sizes ask for.
at::Tensor tensor_over(std::span<const std::byte> bytes, SafeType type, at::IntArrayRef sizes);

// REQUIRES: contiguous, on the CPU.
std::span<const std::byte> bytes_of(const at::Tensor& tensor);

}  // namespace neap::files
