// Which memory, in which state: the key under which a saved storage is known.
//
// Two saved tensors have the same identity exactly if they lie in the same storage, count their in-place changes on the
// same version counter, and were saved at the same version. Another counter over the same storage (`x.data`) and
// another version are other identities.
//
// Addresses are compared, but never of dead objects: an identity holds a weak reference to the storage and a reference
// to the counter, so neither address can be reused while the identity lives. The weak reference keeps only the small
// StorageImpl object; its memory is released with the last strong owner. Copies are cheap; reading is thread-safe.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace neap::autograd {

class StorageIdentity {
 public:
  // REQUIRES: tensor.has_storage().
  explicit StorageIdentity(const at::TensorBase& tensor);

  // The storage, if any owner keeps it alive.
  std::optional<c10::Storage> lock() const;
  bool expired() const noexcept { return storage_.expired(); }
  uint32_t version() const noexcept { return version_; }
  // The storage's counter still stands where it stood: the bytes are those that were saved.
  bool unchanged() const { return !counter_.enabled() || counter_.current_version() == version_; }

  friend bool operator==(const StorageIdentity& a, const StorageIdentity& b) noexcept {
    return a.storage_ == b.storage_ && a.version_ == b.version_ && a.counter_address() == b.counter_address();
  }

  std::size_t hash() const noexcept;

 private:
  const void* counter_address() const noexcept;

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::VariableVersion counter_;
  uint32_t version_;
};

}  // namespace neap::autograd

template <>
struct std::hash<neap::autograd::StorageIdentity> {
  std::size_t operator()(const neap::autograd::StorageIdentity& identity) const noexcept { return identity.hash(); }
};
