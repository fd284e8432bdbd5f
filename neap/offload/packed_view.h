// The hook object that stands in the autograd graph for one saved tensor.
//
// It either keeps the tensor (a detached alias of it) or knows its place among the saved storages and how to build the
// tensor over them again. Its destruction is the news that the tensor is not needed any more.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "neap/autograd/version_stamp.h"
#include "neap/base/pooled.h"
#include "neap/offload/tape.h"
#include "neap/offload/tensor_layout.h"

namespace neap::offload {

class PackScope;

class PackedView final : public torch::autograd::SavedVariableHooks, public Pooled<PackedView> {
 public:
  // REQUIRES: call_pack_hook() comes while the scope lives.
  explicit PackedView(PackScope& scope) : scope_(&scope) {}
  ~PackedView() override { Tape::forget(place_); }

  void call_pack_hook(const at::Tensor& tensor) override;
  // As often as backward likes. Throws what eager autograd throws when the tensor was changed in place since.
  at::Tensor call_unpack_hook() override;

 private:
  void pack(const at::Tensor& tensor);
  at::Tensor unpack();

  PackScope* scope_;
  at::Tensor kept_;
  autograd::VersionStamp version_;
  Place place_;
  TensorLayout layout_;
};

}  // namespace neap::offload
