// Experts' mlps on the tokens that are routed to them: no token is dropped, none is padded, and the result does not
// depend on how threads run.
//
// Tokens are sorted by expert, and each expert works on a range of them: its matrices are slices of two stacked
// parameters, its results are added into the rows of its tokens. One expert has a token at most once, so no two of the
// rows that one call adds are the same, and experts follow each other: sums have one order on every device.
//
// How many tokens an expert has decides shapes, so the host has to know: one wait for the device per layer and forward,
// none in backward (docs/decisions/0008-experts.md). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace neap::models {

// Which tokens each expert works on. A pair is a token with one of its experts; pair p of token t is t * per_token + p.
struct Dispatch {
  at::Tensor pairs;             // [pairs] of int64, sorted by expert; by token within one
  at::Tensor tokens;            // [pairs]: the token of each
  std::vector<int64_t> counts;  // pairs of each expert, on the host
};

// `experts` [tokens, per_token] of int64, below `count`, a token's all different. Waits for the device.
Dispatch dispatch(const at::Tensor& experts, int64_t count);

// Σ over a token's experts of weight * (silu(x gateᵀ) * (x upᵀ)) downᵀ.
//   x [tokens, hidden]      weights [tokens, per_token], of any floating dtype
//   gate_up [experts, 2 * size, hidden], gate above up      down [experts, hidden, size]
// Keeps x, both matrices, and [pairs, 2 * size]; gradients are exact and of first order, as in functions.h. Weights of
// matrices that need no gradient cost none.
at::Tensor routed_experts(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& gate_up,
                          const at::Tensor& down, const Dispatch& dispatch);

}  // namespace neap::models
