// What autograd does with the tensors it saves for backward, decided from C++ and without Python.
//
// libtorch asks its autograd engine for a pair of pack/unpack hooks once per saved tensor. Neaptide puts a proxy in
// front of that engine: it answers this one question from the thread's innermost SavedTensorScope and forwards
// everything else.
//
// Order of precedence, innermost first, whatever mixture of languages opened the scopes: Python's own saved-tensor
// hooks that were pushed inside a scope win over it; the scope wins over hooks pushed around it. While torch.compile
// traces, nothing is hooked; where functorch disables saved-tensor hooks, no scope is asked.
//
// Scopes belong to the thread that opened them and do not follow autograd to its worker threads. A worker may open its
// own.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <memory>

namespace neap::autograd {

using torch::autograd::SavedVariableHooks;

// Makes one hook object per saved tensor. Called on the thread that saves, before the tensor is known: the tensor
// arrives in the hook's call_pack_hook(), under no_grad. Null means "this tensor is kept by autograd itself".
//
// Rules for the hook objects:
//  - Never keep the tensor that call_pack_hook() is given, keep its detach(): an operator's saved output owns the very
//    node that owns the hook, and the two would keep each other alive for ever.
//  - call_unpack_hook() may come any number of times (retained graphs, double backward), on any thread.
//  - The destructor is the signal that the tensor is not needed any more. It may run on any thread, long after the
//  scope
//    has closed, so it must not rely on the policy being alive.
//  - Exceptions from both hooks reach the caller of forward or backward with their own type.
//  - With hooks on, autograd no longer checks versions: see version_stamp.h.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  virtual std::unique_ptr<SavedVariableHooks> make_hook() = 0;
};

// Turns a policy on for the current thread while the scope lives. A null policy switches the surrounding scopes off.
// REQUIRES: destroyed on the thread that made it, in the reverse order of construction; the policy outlives the scope.
class SavedTensorScope {
 public:
  // Installs the proxy if that has not happened yet; throws InternalError if this torch does not call the hooks.
  explicit SavedTensorScope(SavedTensorPolicy* policy);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

  SavedTensorPolicy* policy() const noexcept { return policy_; }

  // Innermost scope of this thread, or null.
  static const SavedTensorScope* current() noexcept;

  // Python's hooks were pushed inside of the innermost scope, or there is no scope and they are there: whatever this
  // thread saves now is theirs (torch.utils.checkpoint, save_on_cpu). A scope opened now would take it from them.
  static bool python_wins() noexcept;

 private:
  friend class ProxyEngine;
  friend class ScopeProbe;
  struct NoInstall {};
  SavedTensorScope(SavedTensorPolicy* policy, NoInstall /*tag*/) noexcept;

  SavedTensorPolicy* policy_;
  SavedTensorScope* outer_;
  // Height of Python's hook stack at entry: what Python pushes later is nested inside this scope.
  std::size_t python_depth_;
};

// Puts the proxy in front of the engine that is current now. Idempotent and thread-safe; a scope calls it on first use,
// so calling it early only moves the cost and the error. In a Python process call it after `import torch`: that import
// replaces the engine. (A proxy displaced by a later import is noticed by the next scope, which installs a new one.)
//
// Ends with a self-test that saves one tensor; throws InternalError when the hook does not fire.
void install_saved_tensor_hooks();

}  // namespace neap::autograd
