// How values get into a group and out of it: full parameters, pieces, and what it holds.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "neap/base/error.h"
#include "neap/shard/flat_group.h"
#include "neap/shard/memory_view.h"

namespace neap::shard {

namespace impl = torch::autograd::impl;

void FlatGroup::gather_in_own_dtype(c10::function_ref<void(std::size_t, const at::Tensor&)> visit) {
  NEAP_ASSERT(state_ == State::kSharded);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) adopt_replaced(slots_[i], i);
  at::Tensor full = shard_;
  if (ranks_.shard.size() > 1) {
    full = at::empty({layout_.total()}, shard_.options());
    ranks_.shard.all_gather(full, shard_, unit_).wait();
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    visit(i, full.as_strided(slots_[i].sizes, slots_[i].strides, layout_.offset(i)));
  }
}

void FlatGroup::dissolve() {
  gather_in_own_dtype([&](std::size_t i, const at::Tensor& full) {
    const Slot& slot = slots_[i];
    slot.parameter.mutable_grad().reset();
    look_at(slot.parameter, at::empty_strided(slot.sizes, slot.strides, full.options()).copy_(full));
  });
  slots_.clear();
}

void FlatGroup::load_full(std::size_t i, const at::Tensor& full) {
  NEAP_ASSERT(state_ == State::kSharded);
  Slot& slot = slots_[i];
  NEAP_CHECK(full.sizes() == at::IntArrayRef(slot.sizes), "[shard] expected ", named(slot), " of shape ",
             at::IntArrayRef(slot.sizes), "; found ", full.sizes());
  const at::NoGradGuard no_grad;
  adopt_replaced(slot, i);
  const Piece mine = piece(i);
  if (mine.numel() == 0) return;
  // The parameter's own order of memory; no copy when the value has it already.
  at::Tensor ordered = full.detach();
  if (ordered.strides() != at::IntArrayRef(slot.strides)) {
    ordered = at::empty_strided(slot.sizes, slot.strides, full.options()).copy_(full);
  }
  slot.shard.copy_(in_memory_order(ordered).narrow(0, mine.begin, mine.numel()));
  impl::bump_version(slot.parameter);  // a graph that saved the parameter must not go on with other values
}

void FlatGroup::load_piece(std::size_t i, int64_t begin, const at::Tensor& piece) {
  NEAP_ASSERT(state_ == State::kSharded);
  const at::NoGradGuard no_grad;
  adopt_replaced(slots_[i], i);
  const Piece mine = this->piece(i);
  const int64_t first = std::max(begin, mine.begin), last = std::min(begin + piece.numel(), mine.end);
  if (first >= last) return;
  slots_[i]
      .shard.narrow(0, first - mine.begin, last - first)
      .copy_(piece.detach().narrow(0, first - begin, last - first));
  impl::bump_version(slots_[i].parameter);
}

void FlatGroup::write_back() {
  if (full_.tensor().storage().is_alias_of(shard_.storage())) return;
  NEAP_CHECK(full_dtype_ == shard_dtype_, "[shard] expected full parameters in the dtype of the masters, ",
             shard_dtype_, ", to write them back; found ", full_dtype_, "; use load_full_state()");
  const at::NoGradGuard no_grad;
  const int64_t length = layout_.shard_numel();
  shard_.copy_(full_.tensor().narrow(0, ranks_.shard.rank() * length, length));
  for (Slot& slot : slots_) slot.version = impl::version_counter(slot.parameter).current_version();
}

void FlatGroup::add_usage(Usage& usage) const {
  const auto size = static_cast<int64_t>(c10::elementSize(shard_dtype_));
  usage.shards += Bytes(static_cast<int64_t>(shard_.storage().nbytes()));
  usage.minimum += Bytes(layout_.shard_numel() * size);
  usage.padding += Bytes(layout_.padding() * size / layout_.ranks());
  usage.unsharded += full_.bytes();
  usage.gradients += gradient_.bytes();
  usage.copied += copied_;
  usage.gathers += gathers_;
  usage.scatters += scatters_;
  if (arriving_.defined()) usage.reduced += Bytes(static_cast<int64_t>(arriving_.nbytes()));
  if (reduced_.defined()) usage.reduced += Bytes(static_cast<int64_t>(reduced_.nbytes()));
  if (const auto storage = handed_over_.lock()) usage.reduced += Bytes(static_cast<int64_t>(storage->nbytes()));
}

}  // namespace neap::shard
