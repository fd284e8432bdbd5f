// The storages that stay on the device whatever happens: those of parameters and buffers.
//
// A registry by weak reference, so that a storage that dies and another that is born at its address are never confused
// and the registry keeps no memory alive. Asked once per saved tensor. Thread-safe.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <unordered_map>

#include "neap/base/mutex.h"

namespace neap::autograd {

// A parameter by its look: a leaf that requires grad. Needs no registry, so it also finds a parameter whose storage was
// replaced (`module.to()`, `set_data`) after it was registered.
bool is_trainable_leaf(const at::TensorBase& tensor);
// `weight.t()`, `weight[0]`, …
bool is_view_of_trainable_leaf(const at::TensorBase& tensor);

class ResidentStorages {
 public:
  // Undefined tensors and tensors without storage are ignored. Adding twice is adding once.
  void add(const at::TensorBase& tensor) NEAP_EXCLUDES(mutex_);
  void remove(const at::TensorBase& tensor) NEAP_EXCLUDES(mutex_);

  // Some registered tensor lies in the same storage.
  bool contains(const at::TensorBase& tensor) const NEAP_EXCLUDES(mutex_);

  // Registered here or for the whole process, or a parameter by its look. What "never offload" should ask.
  bool is_resident(const at::TensorBase& tensor) const {
    return is_trainable_leaf(tensor) || contains(tensor) || is_view_of_trainable_leaf(tensor) ||
           of_process().contains(tensor);
  }

  // Storages whose memory some feature takes away and brings back by itself: full parameters of a sharded model. They
  // come and go with that feature, so it registers them once, for everybody.
  static ResidentStorages& of_process();

  // Registered storages that are still alive.
  std::size_t size() const NEAP_EXCLUDES(mutex_);

 private:
  void prune() NEAP_REQUIRES(mutex_);

  mutable Mutex mutex_;
  // The weak reference pins the address that is its key.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_
      NEAP_GUARDED_BY(mutex_);
  std::size_t prune_at_ NEAP_GUARDED_BY(mutex_) = 64;
};

}  // namespace neap::autograd
