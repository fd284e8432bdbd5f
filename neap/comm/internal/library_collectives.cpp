#include "neap/comm/internal/library_collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>

namespace neap::comm::internal {
namespace {

// What sums are made in.
at::ScalarType wide(const RowReduction& how) {
  if (!at::isFloatingType(how.rows)) return at::kLong;
  return how.rows == at::kDouble || how.result == at::kDouble ? at::kDouble : at::kFloat;
}

// rows[0], rows[1], … in rank order, then the average and the factor, and one rounding.
void add_in_order(const at::Tensor& rows, const at::Tensor& result, const RowReduction& how) {
  at::Tensor sum = rows.select(0, 0).to(wide(how), /*non_blocking=*/false, /*copy=*/true);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    const at::Tensor row = rows.select(0, rank).to(sum.scalar_type());
    if (how.reduction.op == ReduceOp::kMax) {
      sum = at::maximum(sum, row);
    } else {
      sum.add_(row);
    }
  }
  if (how.reduction.op == ReduceOp::kAverage) sum.div_(how.ranks);
  if (how.reduction.factor != 1) sum.mul_(how.reduction.factor);
  result.copy_(sum);
}

// Average and factor of a sum that the library made.
void scale(at::Tensor sum, const RowReduction& how) {
  if (how.reduction.op == ReduceOp::kAverage) sum.div_(how.ranks);
  if (how.reduction.factor != 1) sum.mul_(how.reduction.factor);
}

}  // namespace

void reduce_scatter_on(DeviceGroup& library, const at::Tensor& mine, const at::Tensor& full, const RowReduction& how,
                       bool ordered) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor result = mine.view({-1});
  if (ordered || how.reduction.op == ReduceOp::kMax) {
    const at::Tensor rows = at::empty({how.ranks, result.numel()}, full.options());
    library.all_to_all(rows, full);
    return add_in_order(rows, result, how);
  }
  if (how.rows == how.result) {
    library.reduce_scatter_sum(result, full);
    return scale(result, how);
  }
  const at::Tensor sum = at::empty({result.numel()}, full.options());
  library.reduce_scatter_sum(sum, full);
  at::Tensor widened = sum.to(wide(how));
  scale(widened, how);
  result.copy_(widened);
}

void all_reduce_on(DeviceGroup& library, const at::Tensor& tensor, const RowReduction& how, bool ordered) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (how.reduction.op == ReduceOp::kMax) return library.all_reduce_max(tensor);
  if (ordered) {
    const at::Tensor rows = at::empty({how.ranks, tensor.numel()}, tensor.options());
    library.all_gather(rows, tensor);
    return add_in_order(rows, tensor.view({-1}), how);
  }
  library.all_reduce_sum(tensor);
  scale(tensor, how);
}

}  // namespace neap::comm::internal
