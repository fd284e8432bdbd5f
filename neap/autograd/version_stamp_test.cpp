#include "neap/autograd/version_stamp.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>

#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/test_support.h"
#include "testing/error_of.h"

namespace neap::autograd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Runs build(leaf, and what to call once everything is saved) and backward; gives the text of the error.
using Build = std::function<Tensor(const Tensor& leaf)>;
using Change = std::function<void()>;

std::string error_of_backward(bool with_hooks, const std::function<Tensor(const Tensor&, Change&)>& build) {
  RecordingPolicy policy;
  const Tensor leaf = at::empty({4}).set_requires_grad(true);
  Tensor y;
  Change change;
  {
    std::optional<SavedTensorScope> scope;
    if (with_hooks) scope.emplace(&policy);
    y = build(leaf, change);
  }
  {
    const at::NoGradGuard no_grad;
    change();
  }
  return neap::testing::error_of<c10::Error>([&] { y.sum().backward(); });
}

// Eager autograd and hooks with stamps say the same about a change: type, shape, both versions.
void expect_caught_as_in_eager(const std::string& versions,
                               const std::function<Tensor(const Tensor&, Change&)>& build) {
  for (const bool with_hooks : {false, true}) {
    const std::string text = error_of_backward(with_hooks, build);
    EXPECT_THAT(text, StartsWith("one of the variables needed for gradient computation has been modified by an inplace "
                                 "operation: [CPUFloatType [4]]"))
        << with_hooks;
    EXPECT_THAT(text, HasSubstr(versions)) << with_hooks;
    EXPECT_THAT(text,
                HasSubstr("Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                          "with torch.autograd.set_detect_anomaly(True"))
        << with_hooks;
  }
}

TEST(VersionStamp, AChangedSavedInputIsCaughtAsInEager) {
  expect_caught_as_in_eager("is at version 1; expected version 0 instead", [](const Tensor& leaf, Change& change) {
    const Tensor input = leaf * 2;
    change = [=] { input.add_(1); };
    return input.sin();
  });
}

TEST(VersionStamp, AChangedSavedOutputIsCaughtAsInEager) {
  expect_caught_as_in_eager("is at version 2; expected version 0 instead", [](const Tensor& leaf, Change& change) {
    const Tensor output = (leaf * 2).sigmoid();
    change = [=] { output.add_(1).mul_(2); };
    return output * 1;
  });
}

TEST(VersionStamp, AChangeThroughAViewIsCaughtAsInEager) {
  expect_caught_as_in_eager("is at version 1; expected version 0 instead", [](const Tensor& leaf, Change& change) {
    const Tensor input = leaf * 2;
    change = [=] { input.view({2, 2}).select(0, 0).zero_(); };
    return input.sin();
  });
}

TEST(VersionStamp, AChangedBaseOfASavedViewIsCaughtAsInEager) {
  expect_caught_as_in_eager("is at version 1; expected version 0 instead", [](const Tensor& leaf, Change& change) {
    const Tensor base = (leaf * 2).repeat({2});
    change = [=] { base.zero_(); };
    return base.narrow(0, 2, 4).sin();
  });
}

TEST(VersionStamp, AChangeThroughADetachedAliasIsCaughtAsInEager) {
  expect_caught_as_in_eager("is at version 1; expected version 0 instead", [](const Tensor& leaf, Change& change) {
    const Tensor input = leaf * 2;
    change = [=] { input.detach().add_(1); };
    return input.sin();
  });
}

TEST(VersionStamp, AChangedParameterIsCaughtAsInEager) {
  expect_caught_as_in_eager("is at version 1; expected version 0 instead", [](const Tensor& leaf, Change& change) {
    change = [=] { leaf.mul_(0.9); };  // an optimizer between forward and backward
    return leaf * leaf.sin();
  });
}

TEST(VersionStamp, AWriteThroughDataGoesUnnoticedAsInEager) {
  for (const bool with_hooks : {false, true}) {
    EXPECT_EQ(error_of_backward(with_hooks,
                                [](const Tensor& leaf, Change& change) {
                                  const Tensor input = leaf * 2;
                                  change = [=] { input.variable_data().add_(1); };
                                  return input.sin();
                                }),
              neap::testing::kNoError);
  }
}

TEST(VersionStamp, AnUnrelatedChangeRaisesNothing) {
  for (const bool with_hooks : {false, true}) {
    EXPECT_EQ(error_of_backward(with_hooks,
                                [](const Tensor& leaf, Change& change) {
                                  const Tensor input = leaf * 2;
                                  input.add_(1);  // before it is saved
                                  Tensor output = input.sin();
                                  change = [=] { output.zero_(); };
                                  return output;
                                }),
              neap::testing::kNoError);
  }
}

TEST(VersionStamp, NamesDeviceTypeShapeAndVersions) {
  const Tensor tensor = at::empty({2, 3}, at::kDouble);
  tensor.add_(1);
  const VersionStamp stamp(tensor);
  EXPECT_EQ(stamp.expected(), 1U);
  EXPECT_NO_THROW(stamp.check(tensor.options(), tensor.sizes()));
  tensor.add_(1).add_(1);
  EXPECT_THAT(neap::testing::error_of<c10::Error>([&] { stamp.check(tensor.options(), tensor.sizes()); }),
              HasSubstr("[CPUDoubleType [2, 3]] is at version 3; expected version 1 instead"));
}

TEST(VersionStamp, HoldsNeitherTensorNorMemory) {
  Tensor tensor = at::ones({8});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = tensor.storage().getWeakStorageImpl();
  const VersionStamp stamp(tensor);
  tensor = Tensor();
  EXPECT_TRUE(storage.expired());
  EXPECT_FALSE(stamp.modified());
}

TEST(VersionStamp, WithoutAVersionNothingIsEverModified) {
  EXPECT_FALSE(VersionStamp().modified());
  EXPECT_FALSE(VersionStamp(Tensor()).modified());
  const c10::InferenceMode inference;
  const Tensor tensor = at::empty({2});
  const VersionStamp stamp(tensor);
  tensor.zero_();
  EXPECT_FALSE(stamp.modified());
}

}  // namespace
}  // namespace neap::autograd::testing
