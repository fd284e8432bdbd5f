#include "neap/shard/full_gradient.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "neap/base/error.h"
#include "neap/shard/memory_view.h"

namespace neap::shard {

FullGradient::FullGradient(int64_t numel, c10::ScalarType wide, std::optional<c10::ScalarType> narrow,
                           c10::Device device, std::string message)
    : message_(std::move(message)), wide_(numel, wide, device, message_) {
  if (narrow) narrow_.emplace(numel, *narrow, device, message_);
}

void FullGradient::add_view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  views_.push_back(
      {wide_.view(offset, sizes, strides), narrow_ ? narrow_->view(offset, sizes, strides) : at::Tensor()});
}

void FullGradient::open(bool single_pass) {
  NEAP_ASSERT(!exists_);
  in_narrow_ = single_pass && narrow_;
  may_be_lone_ = single_pass && views_.size() == 1 && views_[0].wide.numel() == wide_.tensor().numel();
  if (!may_be_lone_) allocate();
  exists_ = true;
}

void FullGradient::allocate() {
  current().allocate();
  current().tensor().fill_(-0.0);
}

at::Tensor FullGradient::target(std::size_t i) const {
  return may_be_lone_ ? at::Tensor() : as_gradient(current(views_[i]));
}

// It is the whole flat tensor, alone in its memory and without a graph of its own.
bool FullGradient::fills(const View& view, const at::Tensor& grad) const {
  const at::Tensor& wanted = current(view);
  return !grad.requires_grad() && grad.layout() == at::kStrided && grad.scalar_type() == wanted.scalar_type() &&
         grad.device() == wanted.device() && grad.sizes() == wanted.sizes() && grad.strides() == wanted.strides() &&
         grad.storage_offset() == 0 && grad.storage().nbytes() == grad.nbytes();
}

Bytes FullGradient::take_in(std::size_t i, at::Tensor& grad) {
  const View& view = views_[i];
  if (may_be_lone_ && fills(view, grad)) {
    lone_ = in_memory_order(grad);
    return {};
  }
  const at::Tensor& place = current(view);
  if (std::exchange(may_be_lone_, false)) {
    lone_.reset();
    allocate();
  } else if (grad.is_alias_of(place)) {
    return {};
  }
  // Under create_graph autograd accumulates out of place: old and new together.
  place.variable_data().copy_(grad);
  grad = as_gradient(place);
  return Bytes(static_cast<int64_t>(place.nbytes()));
}

Bytes FullGradient::bytes() const {
  return Bytes(lone_.defined() ? static_cast<int64_t>(lone_.nbytes()) : 0) + wide_.bytes() +
         (narrow_ ? narrow_->bytes() : Bytes());
}

const at::Tensor& FullGradient::flat() {
  if (lone_.defined()) return lone_;
  if (!current().allocated()) allocate();
  return current().tensor();
}

at::Tensor FullGradient::take() {
  NEAP_ASSERT(exists_ && !narrow_);
  exists_ = false;
  if (lone_.defined()) return std::exchange(lone_, at::Tensor());
  if (!wide_.allocated()) allocate();
  return wide_.take(message_);
}

void FullGradient::release() noexcept {
  exists_ = false;
  lone_.reset();
  wide_.release(message_);
  if (narrow_) narrow_->release(message_);
}

}  // namespace neap::shard
