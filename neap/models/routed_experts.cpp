#include "neap/models/routed_experts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "neap/base/error.h"
#include "neap/models/internal/hand_written.h"

namespace neap::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Calls visit(expert, first pair, number of pairs) for the experts that have any.
template <class Visit>
void for_each_expert(const std::vector<int64_t>& counts, const Visit& visit) {
  int64_t begin = 0;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    if (counts[expert] > 0) visit(static_cast<int64_t>(expert), begin, counts[expert]);
    begin += counts[expert];
  }
}

void mm_into(at::Tensor out, const at::Tensor& a, const at::Tensor& b) { at::mm_out(out, a, b); }

// Gradients of stacked matrices, of which every slice is written: those of experts without a token are zero.
at::Tensor stacked_like(const at::Tensor& matrices, const std::vector<int64_t>& counts) {
  at::Tensor out = at::empty_like(matrices);
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    if (counts[expert] == 0) out.select(0, static_cast<int64_t>(expert)).zero_();
  }
  return out;
}

struct RoutedExpertsFunction : torch::autograd::Function<RoutedExpertsFunction> {
  enum Input : std::size_t { kX, kWeights, kGateUp, kDown };

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weights,
                            const at::Tensor& gate_up, const at::Tensor& down, const Dispatch* dispatch) {
    const int64_t pairs = dispatch->pairs.numel(), size = down.size(2);
    const at::Tensor weight = weights.reshape({-1}).index_select(0, dispatch->pairs).to(x.scalar_type()).unsqueeze_(-1);
    const at::Tensor pre = at::empty({pairs, 2 * size}, x.options());
    for_each_expert(dispatch->counts, [&](int64_t expert, int64_t begin, int64_t count) {
      mm_into(pre.narrow(0, begin, count), x.index_select(0, dispatch->tokens.narrow(0, begin, count)),
              gate_up.select(0, expert).t());
    });
    // The weight goes into the narrower side of the last product, so backward needs none of its results.
    const at::Tensor inner = at::silu(pre.narrow(1, 0, size)).mul_(pre.narrow(1, size, size)).mul_(weight);
    at::Tensor out = at::zeros_like(x);
    for_each_expert(dispatch->counts, [&](int64_t expert, int64_t begin, int64_t count) {
      out.index_add_(0, dispatch->tokens.narrow(0, begin, count),
                     at::mm(inner.narrow(0, begin, count), down.select(0, expert).t()));
    });
    context->save_for_backward({x, weight, gate_up, down, pre, dispatch->pairs, dispatch->tokens});
    context->saved_data["counts"] = dispatch->counts;
    context->saved_data["per_token"] = weights.size(1);
    context->saved_data["weights_type"] = static_cast<int64_t>(weights.scalar_type());
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    internal::require_first_order("routed_experts");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &gate_up = saved[2], &down = saved[3], &pre = saved[4];
    const at::Tensor &pairs = saved[5], &tokens = saved[6];
    const std::vector<int64_t> counts = context->saved_data["counts"].toIntVector();
    const bool wants_matrices = context->needs_input_grad(kGateUp) || context->needs_input_grad(kDown);
    const int64_t size = down.size(2);
    const at::Tensor& grad = grads[0];

    const at::Tensor gate = pre.narrow(1, 0, size), up = pre.narrow(1, size, size);
    const at::Tensor active = at::silu(gate);
    const at::Tensor product = at::mul(active, up);  // without the weight
    const at::Tensor inner = at::mul(product, weight);
    at::Tensor grad_inner = at::empty_like(product);
    const at::Tensor grad_down = wants_matrices ? stacked_like(down, counts) : at::Tensor();
    for_each_expert(counts, [&](int64_t expert, int64_t begin, int64_t count) {
      const at::Tensor rows = grad.index_select(0, tokens.narrow(0, begin, count));
      mm_into(grad_inner.narrow(0, begin, count), rows, down.select(0, expert));
      if (wants_matrices) mm_into(grad_down.select(0, expert), rows.t(), inner.narrow(0, begin, count));
    });

    // Back to the order of tokens: each pair has one place.
    const at::Tensor sorted = at::mul(grad_inner, product).sum(-1);
    at::Tensor grad_weights = at::empty_like(sorted).index_copy_(0, pairs, sorted);
    grad_weights = grad_weights.view({-1, context->saved_data["per_token"].toInt()})
                       .to(static_cast<at::ScalarType>(context->saved_data["weights_type"].toInt()));

    grad_inner.mul_(weight);
    const at::Tensor grad_pre = at::empty_like(pre);
    at::Tensor grad_gate = grad_pre.narrow(1, 0, size), grad_up = grad_pre.narrow(1, size, size);
    at::mul_out(grad_up, grad_inner, active);
    at::silu_backward_out(grad_gate, grad_inner.mul_(up), gate);
    at::Tensor grad_x = at::zeros_like(x);
    const at::Tensor grad_gate_up = wants_matrices ? stacked_like(gate_up, counts) : at::Tensor();
    for_each_expert(counts, [&](int64_t expert, int64_t begin, int64_t count) {
      const at::Tensor own = tokens.narrow(0, begin, count);
      const at::Tensor grad_rows = grad_pre.narrow(0, begin, count);
      grad_x.index_add_(0, own, at::mm(grad_rows, gate_up.select(0, expert)));
      if (wants_matrices) mm_into(grad_gate_up.select(0, expert), grad_rows.t(), x.index_select(0, own));
    });
    return {std::move(grad_x), std::move(grad_weights), grad_gate_up, grad_down, {}};
  }
};

}  // namespace

Dispatch dispatch(const at::Tensor& experts, int64_t count) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = experts.reshape({-1});
  const at::Tensor pairs = at::argsort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  // Integers: their sums have one value in any order.
  const at::Tensor counts = at::zeros({count}, flat.options()).scatter_add_(0, flat, at::ones_like(flat)).cpu();
  const int64_t* values = counts.const_data_ptr<int64_t>();
  return {pairs, pairs.div(experts.size(1), "floor"), {values, values + count}};
}

at::Tensor routed_experts(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& gate_up,
                          const at::Tensor& down, const Dispatch& dispatch) {
  NEAP_CHECK(gate_up.dim() == 3 && down.dim() == 3 && gate_up.size(0) == down.size(0) &&
                 gate_up.size(1) == 2 * down.size(2) && gate_up.size(2) == down.size(1),
             "[models] routed_experts: expected gate_up [experts, 2 * size, hidden] and down [experts, hidden, size]; "
             "found ",
             gate_up.sizes(), " and ", down.sizes());
  NEAP_CHECK(
      x.dim() == 2 && x.size(1) == down.size(1) && weights.dim() == 2 && weights.size(0) == x.size(0) &&
          weights.numel() == dispatch.pairs.numel() && static_cast<int64_t>(dispatch.counts.size()) == down.size(0),
      "[models] routed_experts: expected x [tokens, hidden], weights [tokens, per_token] and their dispatch over ",
      down.size(0), " experts; found ", x.sizes(), " and ", weights.sizes());
  return RoutedExpertsFunction::apply(x, weights, gate_up, down, &dispatch);
}

}  // namespace neap::models
