// torch-free
#include "neap/offload/storage_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "testing/error_of.h"

namespace neap::offload {
namespace {

using enum StorageState;

// Written out once more on purpose: the table is the contract, and this is its second opinion.
const std::set<std::pair<StorageState, StorageState>> kLegal = {
    {kDevice, kCopyingOut}, {kDevice, kKept},   {kCopyingOut, kHost},    {kCopyingOut, kReloaded},
    {kHost, kCopyingIn},    {kHost, kReloaded}, {kCopyingIn, kReloaded}, {kReloaded, kHost}};

TEST(StorageState, EveryPairIsLegalOrAnInternalError) {
  for (const StorageState from : kAllStorageStates) {
    for (const StorageState to : kAllStorageStates) {
      StorageState state = from;
      if (kLegal.contains({from, to})) {
        EXPECT_NO_THROW(advance(state, to)) << from << " to " << to;
        EXPECT_EQ(state, to);
      } else {
        EXPECT_THROW(advance(state, to), InternalError) << from << " to " << to;
        EXPECT_EQ(state, from) << "an illegal step must change nothing";
      }
    }
  }
}

TEST(StorageState, AnIllegalStepIsNamed) {
  StorageState state = kKept;
  EXPECT_THAT(testing::error_of<InternalError>([&] { advance(state, kHost); }),
              ::testing::HasSubstr("cannot go from kept to host"));
}

TEST(StorageState, OnlyTheHostStateHoldsNoDeviceMemory) {
  for (const StorageState state : kAllStorageStates) EXPECT_EQ(holds_device_memory(state), state != kHost) << state;
}

}  // namespace
}  // namespace neap::offload
