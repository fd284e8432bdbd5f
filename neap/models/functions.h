// Differentiable functions of the decoder that keep less for backward, and do it in fewer passes over memory, than the
// composition of ATen operators they replace.
//
// Each one is made of ATen operators alone, so it runs on every device, and keeps what it needs through autograd's
// saved tensors, so that offload sees it. Gradients are exact, but of first order: asking for a graph of the gradient
// (create_graph) is a UserError. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace neap::models {

// cos and sin of position times frequency, both [sequence, head_dim / 2], or [batch, sequence, head_dim / 2] where rows
// have positions of their own. Made once per forward, shared by all layers.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

// x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 whatever the dtype.
// Keeps x, weight and one float per row.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// silu(gate) * up. Keeps gate and up.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// swiglu(gate, up) weightᵀ, with the bits of at::linear. Keeps gate, up and weight; the product between, as wide as
// either, is made again in backward, where one more multiplication is cheap beside the matrix products.
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight);

// Which two elements turn together: those half of the rotated part apart (GPT-NeoX, Llama), or neighbours (the original
// of arXiv 2104.09864, DeepSeek).
enum class RotaryPairs : uint8_t { kHalves, kNeighbours };

// Rotates the last 2 * tables.cos.size(-1) elements of each head of x [batch, sequence, heads, head_dim] by its
// position and hands the elements before on. The result has the first of all pairs and then the second of all pairs,
// whatever the layout of x: scores of queries and keys are the same for any one order. Keeps only the tables.
at::Tensor apply_rotary(const at::Tensor& x, const RotaryTables& tables, RotaryPairs pairs = RotaryPairs::kHalves);

// The rows of `weight` that `ids` names, and `weight` again for a tied output projection. Taking both uses from one
// function lets backward add the gradient of the rows into the gradient of the projection: no second dense
// [vocabulary, hidden] gradient is made.
std::pair<at::Tensor, at::Tensor> tied_embedding(const at::Tensor& weight, const at::Tensor& ids);

}  // namespace neap::models
