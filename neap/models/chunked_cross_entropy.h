// Cross entropy of a linear output head without the logits ever being whole in memory.
//
// For each chunk of tokens the forward computes logits, loss and, when a gradient will be asked for, the gradients of
// hidden states and weight at once, then drops the logits. Backward scales those gradients, which are kept as saved
// tensors. The gradients are those of at::cross_entropy; asking for a graph of them is a UserError. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace neap::models {

struct LossOptions {
  int64_t ignore_index = -100;
  double z_loss = 0.0;  // adds z_loss * logsumexp(logits)^2 to each token's loss
  // The sum over tokens is divided by this; if unset, by the number of tokens not ignored, and without any the loss is
  // 0. Give the count of the whole global batch to weight micro-batches by their tokens.
  std::optional<double> divisor = std::nullopt;
  int64_t chunk_tokens = 0;  // 0: as many as keep one chunk's float32 logits within 32 MiB
};

// hidden [tokens, hidden_size], weight [vocabulary, hidden_size], labels [tokens] (int64) → a float32 scalar.
at::Tensor chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                 const LossOptions& options = {});

}  // namespace neap::models
