#include "neap/sim/torch/cpu_call.h"

namespace neap::sim {

int AddressIndex::find(const void* address) const {
  if (positions_.empty()) {
    for (std::size_t i = 0; i < addresses_.size(); ++i)
      if (addresses_[i] == address) return static_cast<int>(i);
    return -1;
  }
  const auto found = positions_.find(address);
  return found == positions_.end() ? -1 : found->second;
}

void AddressIndex::add(const void* address) {
  addresses_.push_back(address);
  if (!positions_.empty()) {
    positions_.emplace(address, static_cast<int>(addresses_.size()) - 1);
  } else if (addresses_.size() > kLinear) {
    for (std::size_t i = 0; i < addresses_.size(); ++i) positions_.emplace(addresses_[i], static_cast<int>(i));
  }
}

void CpuCall::check_device(const at::Tensor& tensor) {
  const int device = tensor.device().index();
  set_device(device);
  TORCH_CHECK(device == device_,
              "Expected all tensors to be on the same device, but found at least two devices, sim:", device_,
              " and sim:", device, "! (", name_, ")");
}

at::Tensor CpuCall::alias(const at::Tensor& tensor, OpPlan::Use use) {
  if (!tensor.defined()) return tensor;
  if (!on_sim(tensor)) {
    TORCH_CHECK(takes_cpu_tensors_ || tensor.dim() == 0 || tensor.device().is_meta(),
                "Expected all tensors to be on the same device, but found at least two devices, sim and ",
                tensor.device(), "! (", name_, ")");
    return tensor;
  }
  check_device(tensor);
  const bool written = use != OpPlan::Use::kReads;
  if (const int known = tensors_.find(tensor.unsafeGetTensorImpl()); known >= 0) {
    auto& argument = arguments_[known];
    if (written) note(tensor, use);
    argument.written |= written;
    return argument.alias;
  }
  note(tensor, use);
  auto alias = tensor_over(alias_of(tensor.storage()), c10::DispatchKey::CPU, tensor);
  tensors_.add(tensor.unsafeGetTensorImpl());
  arguments_.push_back({tensor, alias, written});
  return alias;
}

void CpuCall::note(const at::Tensor& tensor, OpPlan::Use use) {
  ranges_.push_back(range_of(tensor, use != OpPlan::Use::kReads));
  bytes_ += traffic_bytes(tensor) * (use == OpPlan::Use::kUpdates ? 2 : 1);
}

const c10::Storage& CpuCall::alias_of(const c10::Storage& storage) {
  if (const int known = originals_.find(storage.unsafeGetStorageImpl()); known >= 0) return storages_[known].alias;
  storages_.push_back({storage, cpu_alias(storage)});
  originals_.add(storage.unsafeGetStorageImpl());
  aliases_.add(storages_.back().alias.unsafeGetStorageImpl());
  return storages_.back().alias;
}

void CpuCall::begin() {
  set_device(Engine::current_device());
  engine().drain(engine().current_stream(device_));
}

void CpuCall::produced(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage() && aliases_.find(tensor.storage().unsafeGetStorageImpl()) < 0)
    bytes_ += traffic_bytes(tensor);
}

// After the kernel has run, because only then its results, part of its cost, are known. The checker does not mind: it
// judges by the order of submission.
void CpuCall::finish(double flops) {
  engine().begin_kernel(engine().current_stream(device_), {ranges_.data(), ranges_.size()}, name_,
                        {.flops = flops, .bytes = bytes_});
  commit();
}

void CpuCall::synchronize() { engine().synchronize(engine().current_stream(device_)); }

at::Tensor CpuCall::result(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  for (auto& argument : arguments_)
    if (argument.alias.is_same(tensor)) return argument.original;
  TORCH_CHECK(tensor.layout() == c10::kStrided, name_, ": sim has strided tensors only; the result is ",
              tensor.layout());
  const auto& storage = tensor.storage();
  int home = aliases_.find(storage.unsafeGetStorageImpl());
  if (home < 0) {
    storages_.push_back({adopt(storage, device_), storage});
    originals_.add(storages_.back().original.unsafeGetStorageImpl());
    aliases_.add(storage.unsafeGetStorageImpl());
    home = static_cast<int>(storages_.size()) - 1;
  }
  return tensor_over(storages_[home].original, c10::DispatchKey::PrivateUse1, tensor);
}

void CpuCall::commit() {
  for (const auto& argument : arguments_) {
    if (!argument.written) continue;
    commit_storage(argument);
    const auto& alias = argument.alias;
    const auto& original = argument.original;
    if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
        alias.storage_offset() != original.storage_offset()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
}

void CpuCall::commit_storage(const Argument& argument) {
  const auto& alias = argument.alias.storage();
  const int home = aliases_.find(alias.unsafeGetStorageImpl());
  if (home < 0) {  // set_() gave the tensor a storage of its own
    argument.original.unsafeGetTensorImpl()->set_storage_keep_dtype(adopt(alias, device_));
    return;
  }
  auto* original = storages_[home].original.unsafeGetStorageImpl();
  auto* grown = alias.unsafeGetStorageImpl();
  if (grown->nbytes() == original->nbytes() && grown->data() == original->data()) return;
  // The alias grew by its allocator, i.e. on the device: hand the memory over and leave the alias a plain pointer.
  auto memory = grown->set_data_ptr(c10::DataPtr(grown->mutable_data(), c10::Device(c10::kCPU)));
  original->set_data_ptr_noswap(relabelled(std::move(memory), original->device()));
  original->set_nbytes(grown->nbytes());
}

}  // namespace neap::sim
