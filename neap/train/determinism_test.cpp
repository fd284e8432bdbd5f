#include "neap/train/determinism.h"

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "neap/base/scope_exit.h"

namespace neap::train {
namespace {

using ::testing::HasSubstr;

// Which of two equal places wins is not defined, so that this one has no deterministic implementation on any device.
void put_twice() {
  at::Tensor target = at::zeros({2});
  target.put_(at::zeros({2}, at::kLong), at::ones({2}), /*accumulate=*/false);
}

class Determinism : public ::testing::Test {
 protected:
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST_F(Determinism, OffLeavesTheProcessAsItIs) {
  at::globalContext().setDeterministicAlgorithms(true, true);
  set_deterministic(Deterministic::kOff);
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_TRUE(at::globalContext().deterministicAlgorithmsWarnOnly());
}

TEST_F(Determinism, OnRefusesAnOperatorThatHasNoDeterministicImplementation) {
  EXPECT_NO_THROW(put_twice());
  set_deterministic(Deterministic::kOn);
  EXPECT_FALSE(at::globalContext().deterministicFillUninitializedMemory());
  try {
    put_twice();
    FAIL() << "put_ ran";
  } catch (const c10::Error& error) {
    EXPECT_EQ(nondeterministic_text(error),
              "[train.deterministic] expected operators with a deterministic implementation; found: put_ does not have "
              "a deterministic implementation; train.deterministic: warn goes on with a warning, false without one");
  }
}

TEST_F(Determinism, WarnLetsItRunAndTellsIt) {
  set_deterministic(Deterministic::kWarn);
  struct Handler : c10::WarningHandler {
    std::string text;
    void process(const c10::Warning& warning) override { text += warning.msg(); }
  } handler;
  c10::WarningUtils::WarningHandlerGuard guard(&handler);
  const bool always = c10::WarningUtils::get_warnAlways();
  c10::WarningUtils::set_warnAlways(true);  // it is told once a process
  const ScopeExit once([&] { c10::WarningUtils::set_warnAlways(always); });
  EXPECT_NO_THROW(put_twice());
  EXPECT_THAT(handler.text, HasSubstr("put_ does not have a deterministic implementation"));
}

TEST_F(Determinism, OtherErrorsAreNotItsMatter) {
  EXPECT_EQ(nondeterministic_text(std::runtime_error("does not have a deterministic implementation")), std::nullopt);
  try {
    TORCH_CHECK(false, "shapes differ");
  } catch (const c10::Error& error) {
    EXPECT_EQ(nondeterministic_text(error), std::nullopt);
  }
}

}  // namespace
}  // namespace neap::train
