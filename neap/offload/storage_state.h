// torch-free
// The states of a saved storage and the steps between them.
//
//   kDevice ● ── copy begins ──▶ kCopyingOut ● ── released ──▶ kHost ── load begins ──▶ kCopyingIn ● ──▶ kReloaded ●
//      │                            │                          ▲ │                                          │ ▲
//      └─ stays ─▶ kKept ●          └── recalled: still here ──┼─┴── forwarded: another owner has it ───────┼─┘
//                                                              └──── used; the host keeps the bytes ────────┘
//
// In the states marked ● the engine holds a reference to device memory. From kCopyingOut on the host buffer holds, or
// is about to hold, the bytes, and keeps them until the last tensor that was saved from the storage is gone: so the way
// back from kReloaded to kHost costs no copy.
#pragma once

#include <array>
#include <cstdint>
#include <ostream>
#include <string_view>

#include "neap/base/error.h"

namespace neap::offload {

enum class StorageState : uint8_t { kDevice, kCopyingOut, kHost, kCopyingIn, kReloaded, kKept };

inline constexpr std::array kAllStorageStates = {StorageState::kDevice,   StorageState::kCopyingOut,
                                                 StorageState::kHost,     StorageState::kCopyingIn,
                                                 StorageState::kReloaded, StorageState::kKept};

constexpr std::string_view to_string(StorageState state) {
  constexpr std::array<std::string_view, kAllStorageStates.size()> kNames = {"device",     "copying out", "host",
                                                                             "copying in", "reloaded",    "kept"};
  return kNames[static_cast<size_t>(state)];
}

inline std::ostream& operator<<(std::ostream& out, StorageState state) { return out << to_string(state); }

// The one table of legal steps.
constexpr bool may_become(StorageState from, StorageState to) {
  using enum StorageState;
  switch (from) {
    case kDevice:
      return to == kCopyingOut || to == kKept;
    case kCopyingOut:
      return to == kHost || to == kReloaded;
    case kHost:
      return to == kCopyingIn || to == kReloaded;
    case kCopyingIn:
      return to == kReloaded;
    case kReloaded:
      return to == kHost;
    case kKept:
      return false;
  }
  return false;
}

constexpr bool holds_device_memory(StorageState state) { return state != StorageState::kHost; }

// `state` becomes `to`; InternalError when the table has no such step, and then nothing changes.
inline void advance(StorageState& state, StorageState to) {
  NEAP_ASSERT(may_become(state, to), "a saved storage cannot go from ", state, " to ", to);
  state = to;
}

}  // namespace neap::offload
