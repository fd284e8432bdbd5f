// Documents that share a row of tokens: which token belongs to which, its place in it, and what it may attend to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace neap::models {

struct Documents {
  at::Tensor positions;  // [batch, sequence] of int64: from 0 in each document, and at the beginning of each row
  // [batch, 1, sequence, sequence], added to the scores of queries (third) with keys: 0 for a key of the same document
  // that is not later, else -infinity.
  at::Tensor mask;
};

// `ids` [batch, sequence] of int64; a document ends with `end_token`, which belongs to it. `type`: of the mask. On the
// device of `ids`; the host does not wait for it.
Documents find_documents(const at::Tensor& ids, int64_t end_token, at::ScalarType type);

}  // namespace neap::models
