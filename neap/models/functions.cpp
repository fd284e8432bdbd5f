#include "neap/models/functions.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include "neap/models/internal/hand_written.h"

namespace neap::models {
namespace {

using internal::require_first_order;
using internal::wide_type;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps) {
    const at::ScalarType type = x.scalar_type();
    const at::Tensor wide = x.to(wide_type(type));
    // The norm reads x once and writes one number per row; square().mean() would write another x.
    at::Tensor scale = at::linalg_vector_norm(wide, 2, {-1}, /*keepdim=*/true);
    scale = scale.square_().div_(static_cast<double>(x.size(-1))).add_(eps).rsqrt_();
    context->save_for_backward({x, weight, scale});
    const at::Tensor normed = at::mul(wide, scale);
    return normed.to(type).mul_(weight);
  }

  // With n = x * scale and g = grad * weight:  dx = scale * (g - n * mean(g * n)),  dweight = sum over rows of grad *
  // n.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_first_order("rms_norm");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor& scale = saved[2];
    const int64_t size = weight.numel();
    const at::ScalarType wide = scale.scalar_type();
    const at::Tensor grad = grads[0].to(wide);
    const at::Tensor wide_weight = weight.to(wide);
    const at::Tensor normed = saved[0].to(wide).mul(scale);
    const at::Tensor product = grad.mul(normed);
    at::Tensor grad_weight = product.view({-1, size}).sum(0).to(weight.scalar_type());
    const at::Tensor mean = at::matmul(product, wide_weight).div_(-static_cast<double>(size)).unsqueeze_(-1);
    at::Tensor grad_x = grad.mul(wide_weight).addcmul_(normed, mean).mul_(scale);
    return {grad_x.to(saved[0].scalar_type()), std::move(grad_weight), {}};
  }
};

// The gradient may be overwritten: no other tensor is it, or a view of it (a hook may keep one), and its elements do
// not lie on each other as those of an expanded one do. A view keeps its base, an owner that nobody else may see
// either; what the linear layers of torch hand back for three dimensions is such a view.
bool is_ours_alone(const at::Tensor& grad) {
  if (grad.use_count() != 1 || !grad.is_non_overlapping_and_dense()) return false;
  const bool view = grad.is_view();
  return (!view || grad._base().use_count() == 1) && grad.storage().use_count() == (view ? 2 : 1);
}

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return at::silu(gate).mul_(up);
  }

  // These are the widest tensors of a layer, and here most of them are alive at once: one buffer for each result, and
  // that of the incoming gradient is one of them when nobody else sees it.
  static variable_list backward(AutogradContext* context, variable_list& grads) {
    require_first_order("swiglu");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor grad = std::move(grads[0]);
    at::Tensor grad_up = at::silu(saved[0]).mul_(grad);
    at::Tensor grad_gate = is_ours_alone(grad) ? grad.mul_(saved[1]) : grad.mul(saved[1]);
    at::silu_backward_out(grad_gate, grad_gate, saved[0]);
    return {std::move(grad_gate), std::move(grad_up)};
  }
};

struct SwigluLinearFunction : torch::autograd::Function<SwigluLinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& weight) {
    context->save_for_backward({gate, up, weight});
    return at::linear(at::silu(gate).mul_(up), weight);
  }

  // As SwigluFunction; of the tensors of the inner width three are alive at most.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_first_order("swiglu_linear");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &weight = saved[2];
    const at::Tensor grad = grads[0].reshape({-1, weight.size(0)});
    at::Tensor grad_up = at::silu(gate);
    at::Tensor grad_weight;
    if (context->needs_input_grad(2)) grad_weight = at::mm(grad.t(), grad_up.mul(up).view({-1, weight.size(1)}));
    at::Tensor grad_gate = at::mm(grad, weight).view(gate.sizes());
    grad_up.mul_(grad_gate);
    at::silu_backward_out(grad_gate, grad_gate.mul_(up), gate);
    return {std::move(grad_gate), std::move(grad_up), std::move(grad_weight)};
  }
};

// The two elements of each pair, as views of x's last `size` columns.
std::pair<at::Tensor, at::Tensor> split_pairs(const at::Tensor& x, int64_t size, RotaryPairs pairs) {
  const int64_t begin = x.size(-1) - size;
  if (pairs == RotaryPairs::kNeighbours)
    return {x.slice(-1, begin, x.size(-1), 2), x.slice(-1, begin + 1, x.size(-1), 2)};
  return {x.narrow(-1, begin, size / 2), x.narrow(-1, begin + size / 2, size / 2)};
}

// (first, second) → (first * cos - second * sin, second * cos + first * sin) for sign 1; the inverse for sign -1.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int sign, RotaryPairs from,
                  RotaryPairs to) {
  const int64_t size = 2 * cos.size(-1);
  const at::Tensor c = cos.unsqueeze(-2);  // [sequence, 1, pairs]: one angle for all heads
  const at::Tensor s = sin.unsqueeze(-2);
  const auto [first, second] = split_pairs(x, size, from);
  at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  auto [out_first, out_second] = split_pairs(out, size, to);
  at::mul_out(out_first, first, c).addcmul_(second, s, -sign);
  at::mul_out(out_second, second, c).addcmul_(first, s, sign);
  const int64_t before = x.size(-1) - size;
  if (before > 0) out.narrow(-1, 0, before).copy_(x.narrow(-1, 0, before));
  return out;
}

struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            RotaryPairs pairs) {
    context->save_for_backward({cos, sin});
    context->saved_data["pairs"] = static_cast<int64_t>(pairs);
    return rotate(x, cos, sin, 1, pairs, RotaryPairs::kHalves);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_first_order("apply_rotary");
    const variable_list saved = context->get_saved_variables();
    const auto pairs = static_cast<RotaryPairs>(context->saved_data["pairs"].toInt());
    return {rotate(grads[0], saved[0], saved[1], -1, RotaryPairs::kHalves, pairs), {}, {}, {}};
  }
};

struct TiedEmbeddingFunction : torch::autograd::Function<TiedEmbeddingFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids) {
    context->save_for_backward({ids});
    context->saved_data["sizes"] = weight.sizes();
    context->set_materialize_grads(false);
    return {at::embedding(weight, ids), weight};
  }

  static variable_list backward(AutogradContext* context, variable_list& grads) {
    require_first_order("tied_embedding");
    const at::Tensor rows = std::move(grads[0]);
    at::Tensor grad = std::move(grads[1]);
    if (!rows.defined()) return {std::move(grad), {}};
    const at::Tensor ids = context->get_saved_variables()[0];
    if (!grad.defined()) {
      grad = at::zeros(context->saved_data["sizes"].toIntVector(), rows.options());
    } else if (!is_ours_alone(grad)) {
      grad = grad.clone(at::MemoryFormat::Contiguous);
    }
    // Rows of equal ids must be added in one order. index_add_ does so on host threads, an accumulating index_put_ on
    // CUDA; the other way round each adds them in the order its threads happen to arrive.
    const at::Tensor flat_ids = ids.reshape({-1});
    const at::Tensor flat_rows = rows.reshape({-1, rows.size(-1)});
    if (grad.is_cuda()) {
      grad.index_put_({flat_ids}, flat_rows, /*accumulate=*/true);
    } else {
      grad.index_add_(0, flat_ids, flat_rows);
    }
    return {std::move(grad), {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return RmsNormFunction::apply(x, weight, eps);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return SwigluFunction::apply(gate, up); }

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight) {
  if (gate.scalar_type() != weight.scalar_type()) return at::linear(swiglu(gate, up), weight);  // autocast sees to it
  return SwigluLinearFunction::apply(gate, up, weight);
}

at::Tensor apply_rotary(const at::Tensor& x, const RotaryTables& tables, RotaryPairs pairs) {
  return RotaryFunction::apply(x, tables.cos, tables.sin, pairs);
}

std::pair<at::Tensor, at::Tensor> tied_embedding(const at::Tensor& weight, const at::Tensor& ids) {
  variable_list outputs = TiedEmbeddingFunction::apply(weight, ids);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

}  // namespace neap::models
