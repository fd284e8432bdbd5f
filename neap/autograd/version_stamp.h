// The version check that autograd skips once saved-tensor hooks are in play.
//
// Take a stamp of a tensor when it is saved, check it when it is handed back: a tensor that was modified in place in
// between raises the error that eager autograd raises, a c10::Error of the same text but for the name of a node. As in
// eager autograd, writes through `x.data` go unnoticed, because they count on a counter of their own.
//
// A stamp holds the version counter alone, neither the tensor nor its memory. Thread-safe to read.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace neap::autograd {

// The sizes of a tensor; none of one whose sizes are no list of numbers (nested tensors, symbols).
c10::IntArrayRef listed_sizes(const at::TensorBase& tensor);

class VersionStamp {
 public:
  // A stamp that never fails, for places that are filled later.
  VersionStamp() = default;

  // Stamps the original, not a detached or copied one: x.variable_data() has a counter of its own (x.detach() shares).
  // An inference tensor and an undefined one have no version and are never found modified.
  explicit VersionStamp(const at::TensorBase& tensor);

  bool modified() const { return counter_.enabled() && counter_.current_version() != expected_; }
  uint32_t expected() const { return expected_; }

  // Throws c10::Error if the tensor was modified; `options` and `sizes` describe it in the message.
  void check(const c10::TensorOptions& options, c10::IntArrayRef sizes) const {
    if (modified()) [[unlikely]]
      fail(options, sizes);
  }
  // The same, described by a tensor, which must be defined if it was modified.
  void check(const at::TensorBase& tensor) const {
    if (modified()) [[unlikely]]
      fail(tensor.options(), listed_sizes(tensor));
  }

 private:
  [[noreturn]] void fail(const c10::TensorOptions& options, c10::IntArrayRef sizes) const;

  c10::VariableVersion counter_;
  uint32_t expected_ = 0;
};

}  // namespace neap::autograd
