#include "neap/autograd/storage_identity.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <thread>
#include <unordered_set>
#include <vector>

#include "neap/autograd/resident_storages.h"
#include "neap/base/error.h"

namespace neap::autograd {
namespace {

using at::Tensor;

TEST(StorageIdentity, ViewsAndDetachedAliasesOfOneStorageAreOne) {
  const Tensor base = at::ones({4, 4});
  const StorageIdentity identity(base);
  for (const Tensor& alias : {base.t(), base.select(0, 2), base.detach(), base.narrow(1, 1, 2).unsqueeze(0)}) {
    EXPECT_EQ(identity, StorageIdentity(alias));
    EXPECT_EQ(identity.hash(), StorageIdentity(alias).hash());
  }
  EXPECT_NE(identity, StorageIdentity(base.clone()));
}

TEST(StorageIdentity, AnotherVersionIsAnotherIdentity) {
  const Tensor tensor = at::ones({4});
  const StorageIdentity before(tensor);
  EXPECT_TRUE(before.unchanged());
  tensor.add_(1);
  EXPECT_FALSE(before.unchanged());
  EXPECT_NE(before, StorageIdentity(tensor));
  EXPECT_EQ(StorageIdentity(tensor).version(), before.version() + 1);
}

TEST(StorageIdentity, AnotherCounterOverTheSameStorageIsAnotherIdentity) {
  const Tensor tensor = at::empty({4});
  const Tensor data = tensor.variable_data();
  ASSERT_EQ(tensor.storage().unsafeGetStorageImpl(), data.storage().unsafeGetStorageImpl());
  ASSERT_EQ(StorageIdentity(tensor).version(), StorageIdentity(data).version());
  EXPECT_NE(StorageIdentity(tensor), StorageIdentity(data));
}

TEST(StorageIdentity, KeepsNoMemoryAliveAndSaysWhenTheStorageIsGone) {
  Tensor tensor = at::ones({4});
  const StorageIdentity identity(tensor);
  ASSERT_TRUE(identity.lock().has_value());
  EXPECT_EQ(identity.lock()->unsafeGetStorageImpl(), tensor.storage().unsafeGetStorageImpl());
  EXPECT_EQ(tensor.storage().use_count(), 1U);
  tensor = Tensor();
  EXPECT_TRUE(identity.expired());
  EXPECT_FALSE(identity.lock().has_value());
}

TEST(StorageIdentity, AReusedAddressIsNotTheSameStorage) {
  // Without an identity that watches, the allocator soon gives a new StorageImpl the place of the old one; with one it
  // cannot, however often it is tried.
  std::unordered_set<StorageIdentity> seen;
  for (int i = 0; i < 200; ++i) {
    const Tensor tensor = at::empty({16});
    EXPECT_TRUE(seen.insert(StorageIdentity(tensor)).second) << i;
  }
  EXPECT_EQ(seen.size(), 200U);
  for (const StorageIdentity& identity : seen) EXPECT_TRUE(identity.expired());
}

TEST(StorageIdentity, InferenceTensorsHaveOneWithoutVersion) {
  const c10::InferenceMode inference;
  const Tensor tensor = at::ones({4});
  const StorageIdentity identity(tensor);
  tensor.add_(1);
  EXPECT_TRUE(identity.unchanged());
  EXPECT_EQ(identity, StorageIdentity(tensor));
}

TEST(StorageIdentity, ATensorWithoutStorageHasNone) {
  const Tensor sparse = at::sparse_coo_tensor({2, 2}, at::TensorOptions());
  EXPECT_THROW(StorageIdentity{sparse}, InternalError);
}

TEST(ResidentStorages, FindsEveryAliasOfWhatWasAdded) {
  ResidentStorages residents;
  const Tensor weight = at::ones({4, 4});
  residents.add(weight);
  residents.add(weight.t());
  EXPECT_EQ(residents.size(), 1U);
  EXPECT_TRUE(residents.contains(weight));
  EXPECT_TRUE(residents.contains(weight.t()));
  EXPECT_TRUE(residents.contains(weight.variable_data()));
  EXPECT_FALSE(residents.contains(weight.clone()));
  residents.remove(weight.select(0, 1));
  EXPECT_FALSE(residents.contains(weight));
}

TEST(ResidentStorages, IgnoresUndefinedTensorsAndThoseWithoutStorage) {
  ResidentStorages residents;
  const Tensor sparse = at::sparse_coo_tensor({2, 2}, at::TensorOptions());
  residents.add(Tensor());
  residents.add(sparse);
  residents.remove(Tensor());
  EXPECT_EQ(residents.size(), 0U);
  EXPECT_FALSE(residents.contains(Tensor()));
  EXPECT_FALSE(residents.contains(sparse));
  EXPECT_FALSE(residents.is_resident(Tensor()));
}

TEST(ResidentStorages, ADeadStorageIsForgottenAndItsAddressNeverMistaken) {
  ResidentStorages residents;
  for (int i = 0; i < 1000; ++i) residents.add(at::empty({16}));
  EXPECT_EQ(residents.size(), 0U);
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(residents.contains(at::empty({16})));
}

TEST(ResidentStorages, ParametersAreKnownByTheirLook) {
  const ResidentStorages residents;
  const Tensor weight = at::ones({4, 4}).set_requires_grad(true);
  const Tensor frozen = at::ones({4, 4});
  EXPECT_TRUE(is_trainable_leaf(weight));
  EXPECT_FALSE(is_trainable_leaf(frozen));
  EXPECT_FALSE(is_trainable_leaf(weight * 2));
  EXPECT_FALSE(is_trainable_leaf(weight.t()));
  EXPECT_TRUE(is_view_of_trainable_leaf(weight.t()));
  EXPECT_TRUE(is_view_of_trainable_leaf(weight.t().select(0, 1)));
  EXPECT_FALSE(is_view_of_trainable_leaf(frozen.t()));
  EXPECT_FALSE(is_view_of_trainable_leaf((weight * 2).t()));
  EXPECT_FALSE(is_view_of_trainable_leaf(weight));
  EXPECT_TRUE(residents.is_resident(weight));
  EXPECT_TRUE(residents.is_resident(weight.t()));
  EXPECT_FALSE(residents.is_resident(frozen));
}

TEST(ResidentStorages, MayBeUsedFromManyThreads) {
  ResidentStorages residents;
  const Tensor weight = at::ones({4});
  residents.add(weight);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<Tensor> mine;
      for (int i = 0; i < 200; ++i) {
        mine.push_back(at::empty({4}));
        residents.add(mine.back());
        EXPECT_TRUE(residents.contains(mine.back()));
        EXPECT_TRUE(residents.contains(weight));
        if (i % 2 == 0) residents.remove(mine.back());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(residents.size(), 1U);
}

}  // namespace
}  // namespace neap::autograd
