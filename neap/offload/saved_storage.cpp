#include "neap/offload/saved_storage.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/device/device.h"

namespace neap::offload {
namespace {

// False where the bytes were taken away and reading them is an error (sharded parameters between their uses).
bool has_memory(const c10::Storage& storage) {
  try {
    return storage.data() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

// Vector kernels may choose their path, and with it the order of a sum, by how an address is aligned. What comes back
// lies as it lay.
constexpr int64_t kAlignment = 64;
// Of no element less. Memory of other people's may begin anywhere; what comes back of it is aligned to its elements.
constexpr int64_t kLargestElement = 16;

int64_t padding_of(const c10::Storage& storage, int64_t begin) {
  auto address = reinterpret_cast<uintptr_t>(storage.data());
  address -= address % kLargestElement;
  return static_cast<int64_t>((address + static_cast<uintptr_t>(begin)) % kAlignment);
}

}  // namespace

SavedStorage::SavedStorage(std::shared_ptr<Tape> tape, StorageKey key, const c10::Storage& device,
                           const device::Stream& home, int32_t unit, Ledger& ledger)
    : tape_(std::move(tape)),
      key_(std::move(key)),
      unit_(unit),
      ledger_(ledger),
      device_(device),
      padding_(padding_of(device, key_.range.begin)),
      home_(home) {}

SavedStorage::~SavedStorage() {
  if (let_go_ordered_) return;
  try {
    order_home();
  } catch (const std::exception& error) {
    // The device is in trouble. Memory that a copy may still use must not go back to its allocator.
    log_error("[offload] a device did not accept a wait; ", size(), " stay allocated: ", error.what());
    new c10::Storage(std::move(device_));
  }
}

void SavedStorage::become(StorageState state) {
  const StorageState before = state_;
  advance(state_, state);
  if (before == StorageState::kHost) ledger_.away -= size();
  if (state == StorageState::kHost) ledger_.away += size();
}

void SavedStorage::retire() {
  if (state_ == StorageState::kHost) ledger_.away -= size();
}

void SavedStorage::let_go() {
  become(StorageState::kHost);
  ledger_.let_go.push_back(std::move(device_));
  device_ = {};
}

// Device memory goes before its copy is known to be over.
void SavedStorage::order_home() {
  home_.wait(is_reload_ ? loaded_ : copied_);
  let_go_ordered_ = true;
}

void SavedStorage::copy_out(Link& link, memory::HostBuffer host, Moment& now) {
  NEAP_ASSERT(state_ == StorageState::kDevice, "copy out in state ", state_);
  // Saved on another stream than the present one (other threads): the copy follows what that stream was given.
  Moment at_home(home_);
  auto copy = link.copy_out(device_, key_.range, host, now.stream() == home_ ? now : at_home);
  copied_ = std::move(copy.done);
  copy_number_ = copy.number;
  host_ = std::move(host);
  become(StorageState::kCopyingOut);
  let_go_ordered_ = !link.overlaps();
  if (!link.overlaps()) release(Copy::kDone);
}

void SavedStorage::release(Copy copy) {
  NEAP_ASSERT(state_ == StorageState::kCopyingOut, "release in state ", state_);
  if (copy == Copy::kUnderWay) home_.wait(copied_);
  let_go_ordered_ = true;
  let_go();
}

bool SavedStorage::forward() {
  if (!key_.identity.unchanged()) return false;
  if (state_ == StorageState::kCopyingOut) {
    become(StorageState::kReloaded);
    begin_generation();
    return true;
  }
  if (auto storage = key_.identity.lock()) {
    // An owner may have shrunk or emptied it since (resize_, sharded parameters); then the host has the only copy.
    if (static_cast<int64_t>(storage->nbytes()) < key_.range.end || !has_memory(*storage)) return false;
    hold_again(*std::move(storage), /*is_reload=*/false);
    return true;
  }
  if (!last_reload_) return false;
  auto storage = last_reload_->lock();
  if (!storage) return false;
  hold_again(c10::Storage(std::move(storage)), /*is_reload=*/true);
  return true;
}

void SavedStorage::hold_again(c10::Storage device, bool is_reload) {
  become(StorageState::kReloaded);
  device_ = std::move(device);
  is_reload_ = is_reload;
  begin_generation();
}

void SavedStorage::load(c10::Storage target, StallMeter::Begun begun, Link& link, Moment& now) {
  NEAP_ASSERT(state_ == StorageState::kHost, "load in state ", state_);
  loaded_ = link.copy_in(host_, copy_number_, target, padding_, now);
  become(StorageState::kCopyingIn);
  device_ = std::move(target);
  last_reload_ = device_.getWeakStorageImpl();
  is_reload_ = true;
  home_ = now.stream();
  load_begun_ = begun;
  waited_by_ = link.overlaps() ? std::nullopt : std::optional(home_);  // the copy is work of that stream
  begin_generation();
  let_go_ordered_ = !link.overlaps();
  if (!link.overlaps()) become(StorageState::kReloaded);
}

const c10::Storage& SavedStorage::use(Link& link, Moment& now) {
  NEAP_ASSERT(state_ != StorageState::kHost, "no device memory to use");
  if (is_reload_ && !(waited_by_ && *waited_by_ == now.stream())) {
    if (state_ == StorageState::kCopyingIn) link.in_stalls().add_wait(now.event(), loaded_, size(), load_begun_);
    now.stream().wait(loaded_);
    if (!(now.stream() == home_)) link.device().record_on_stream(device_.data_ptr(), now.stream());
    waited_by_ = now.stream();
    let_go_ordered_ = true;  // by the wait, or by the allocator's record, which is behind it
  }
  if (state_ == StorageState::kCopyingIn) become(StorageState::kReloaded);
  return device_;
}

void SavedStorage::drop() {
  NEAP_ASSERT(state_ == StorageState::kReloaded, "drop in state ", state_);
  if (!let_go_ordered_) order_home();  // recalled while on its way out
  let_go();
  is_reload_ = false;
}

}  // namespace neap::offload
