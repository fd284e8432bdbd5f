// The full gradients of a group as one flat tensor, from the first that backward brings to the end of their reduction;
// internal to the layer.
//
// It has one of three forms, alike on every rank:
//
//   wide    in the dtype of reductions: gradients of several passes add up in it
//   narrow  in the dtype of the full parameters, when one pass alone makes it up: each gradient is then what autograd
//           brought, once, so that widening can be left to the sum over ranks, with the same bits and half the memory
//   lone    of a single parameter, when one pass alone makes it up: the tensor that autograd brought, as it is
//
// Wide and narrow ones start as -0.0, the one float that leaves every addend as it is, so that accumulating into it
// gives the bits of an accumulation that starts from nothing. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/shard/flat_buffer.h"

namespace neap::shard {

class FullGradient {
 public:
  // Without memory. No `narrow`: there is no such form. `message` is what accesses throw while there is no memory.
  FullGradient(int64_t numel, c10::ScalarType wide, std::optional<c10::ScalarType> narrow, c10::Device device,
               std::string message);
  // Of the next parameter; once, in their order.
  void add_view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

  // Gradients come now. `single_pass`: those of no other pass are added before the reduction, on no rank. REQUIRES:
  // !exists().
  void open(bool single_pass);
  // What autograd is to accumulate the parameter's gradient into; undefined: it may bring its own tensor.
  at::Tensor target(std::size_t i) const;
  // `grad`, which autograd brought, is a part of this from now on. Returns what had to be copied for that.
  Bytes take_in(std::size_t i, at::Tensor& grad);

  // From open() to take() or release().
  bool exists() const { return exists_; }
  Bytes bytes() const;
  // One-dimensional. Zeros when nothing has come since open(). REQUIRES: exists().
  const at::Tensor& flat();
  // Moves it out, in the wide dtype. REQUIRES: exists(), and no narrow form.
  at::Tensor take();
  void release() noexcept;

 private:
  struct View {
    at::Tensor wide, narrow;
  };
  bool fills(const View& view, const at::Tensor& grad) const;
  void allocate();
  FlatBuffer& current() { return in_narrow_ ? *narrow_ : wide_; }
  const at::Tensor& current(const View& view) const { return in_narrow_ ? view.narrow : view.wide; }

  const std::string message_;
  FlatBuffer wide_;
  std::optional<FlatBuffer> narrow_;
  std::vector<View> views_;
  at::Tensor lone_;
  bool exists_ = false;
  bool in_narrow_ = false;
  bool may_be_lone_ = false;
};

}  // namespace neap::shard
