#include "neap/autograd/resident_storages.h"

#include <algorithm>
#include <vector>

namespace neap::autograd {
namespace {

const c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

bool is_trainable_leaf(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.is_leaf() && tensor.requires_grad();
}

bool is_view_of_trainable_leaf(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.is_view() && is_trainable_leaf(tensor._base());
}

void ResidentStorages::add(const at::TensorBase& tensor) {
  const c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr) return;
  const MutexLock lock(mutex_);
  if (storages_.size() >= prune_at_) {
    prune();
    prune_at_ = std::max<std::size_t>(64, 2 * storages_.size());
  }
  storages_.try_emplace(storage, tensor.storage().getWeakStorageImpl());
}

void ResidentStorages::remove(const at::TensorBase& tensor) {
  const MutexLock lock(mutex_);
  storages_.erase(storage_of(tensor));
}

bool ResidentStorages::contains(const at::TensorBase& tensor) const {
  const c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr) return false;
  const MutexLock lock(mutex_);
  // No need to look whether the entry has expired: the tensor keeps alive what has this address.
  return storages_.find(storage) != storages_.end();
}

std::size_t ResidentStorages::size() const {
  const MutexLock lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(storages_.begin(), storages_.end(), [](const auto& entry) { return !entry.second.expired(); }));
}

ResidentStorages& ResidentStorages::of_process() {
  static auto* const residents = new ResidentStorages();  // leaked: tensors may outlive every static
  return *residents;
}

void ResidentStorages::prune() {
  std::erase_if(storages_, [](const auto& entry) { return entry.second.expired(); });
}

}  // namespace neap::autograd
