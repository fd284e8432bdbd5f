#include "neap/autograd/storage_identity.h"

#include <c10/util/hash.h>

#include <cstring>

#include "neap/base/error.h"

namespace neap::autograd {
namespace {

c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::TensorBase& tensor) {
  NEAP_ASSERT(tensor.has_storage(), "identity of a tensor without storage");
  return tensor.storage().getWeakStorageImpl();
}

}  // namespace

StorageIdentity::StorageIdentity(const at::TensorBase& tensor) : storage_(weak_storage(tensor)), version_(0) {
  if (tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

std::optional<c10::Storage> StorageIdentity::lock() const {
  c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();
  if (!storage) return std::nullopt;
  return c10::Storage(std::move(storage));
}

const void* StorageIdentity::counter_address() const noexcept {
  // VariableVersion is one counted pointer to the counter and has no way to compare two of them.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* address = nullptr;
  std::memcpy(&address, static_cast<const void*>(&counter_), sizeof address);
  return address;
}

std::size_t StorageIdentity::hash() const noexcept {
  const std::size_t storage = std::hash<const void*>()(storage_._unsafe_get_target());
  const std::size_t counter = std::hash<const void*>()(counter_address());
  return c10::hash_combine(c10::hash_combine(storage, counter), version_);
}

}  // namespace neap::autograd
