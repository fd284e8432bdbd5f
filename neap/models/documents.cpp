#include "neap/models/documents.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <tuple>

namespace neap::models {

Documents find_documents(const at::Tensor& ids, int64_t end_token, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  const int64_t batch = ids.size(0), sequence = ids.size(1);
  // Whether the token before ended a document.
  at::Tensor begins = at::zeros_like(ids);
  begins.narrow(1, 1, sequence - 1).copy_(ids.narrow(1, 0, sequence - 1).eq(end_token));
  const at::Tensor number = begins.cumsum(1);
  const at::Tensor place = at::arange(sequence, ids.options());
  const at::Tensor first = std::get<0>(at::cummax(begins * place, 1));

  const at::Tensor other = number.unsqueeze(2).ne(number.unsqueeze(1));
  const at::Tensor later = place.unsqueeze(1).lt(place.unsqueeze(0));
  at::Tensor mask = at::zeros({batch, sequence, sequence}, ids.options().dtype(type));
  mask.masked_fill_(other.logical_or_(later), -std::numeric_limits<double>::infinity());
  return {place - first, mask.unsqueeze(1)};
}

}  // namespace neap::models
