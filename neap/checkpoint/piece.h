// What a checkpoint is made of: this rank's pieces of named tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace neap::checkpoint {

// Any range of the elements of a tensor, flattened in the order of its memory; as shard::Shard is.
struct Piece {
  std::string name;
  std::vector<int64_t> full_size;  // of the whole tensor
  int64_t begin = 0, end = 0;      // may be empty
  at::Tensor data;                 // one-dimensional, contiguous, on any device
};

// A tensor that this rank holds whole. REQUIRES: contiguous.
inline Piece whole(std::string name, const at::Tensor& tensor) {
  return {std::move(name), tensor.sizes().vec(), 0, tensor.numel(), tensor.detach().view({-1})};
}

}  // namespace neap::checkpoint
