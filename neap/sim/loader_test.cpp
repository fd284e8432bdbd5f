// torch-free
#include "neap/sim/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "neap/base/error.h"
#include "neap/sim/settings.h"
#include "testing/error_of.h"

namespace neap::sim {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

TEST(SimLoader, HandsOutTheLibrarysOneControl) {
  Control& control = load_library(NEAP_SIM_TEST_LIBRARY);
  EXPECT_EQ(&load_library(NEAP_SIM_TEST_LIBRARY), &control);
  EXPECT_EQ(control.config().devices, 1);
}

TEST(SimLoader, SaysWhichFileIsMissing) {
  EXPECT_THAT(error_of([] { load_library("/nowhere/libneap_sim.so"); }),
              AllOf(HasSubstr("[sim] expected the simulated accelerator in /nowhere/libneap_sim.so"),
                    HasSubstr("No such file")));
}

TEST(SimLoader, RefusesALibraryOfAnotherVersion) {
  EXPECT_THAT(error_of([] { load_library(NEAP_SIM_TEST_OTHER_LIBRARY); }),
              HasSubstr("found a library of another version"));
}

TEST(SimLoader, TheEnvironmentNamesTheLibraryAndDescribesTheDevice) {
  // Failures first: none of them may stick.
  setenv(kLibraryVariable, "/nowhere/libneap_sim.so", 1);
  EXPECT_THAT(error_of([] { load(); }), HasSubstr("/nowhere/libneap_sim.so"));
  setenv(kLibraryVariable, NEAP_SIM_TEST_LIBRARY, 1);
  setenv("NEAP_SIM_TEST_REFUSES", "1", 1);
  EXPECT_THAT(error_of([] { load(); }), HasSubstr("another accelerator is active"));
  unsetenv("NEAP_SIM_TEST_REFUSES");
  setenv(kSettingsVariable, "count=nonsense", 1);
  EXPECT_THAT(error_of([] { load(); }), HasSubstr("[NEAP_SIM.count]"));

  setenv(kSettingsVariable, "count=3,capacity=1GiB", 1);
  Control& control = load();
  EXPECT_EQ(control.config().devices, 3);
  EXPECT_EQ(control.config().capacity, Bytes(1 << 30));
  setenv(kSettingsVariable, "count=5", 1);
  EXPECT_EQ(&load(), &control);
  EXPECT_EQ(control.config().devices, 3) << "the first call decides";
  unsetenv(kSettingsVariable);
  unsetenv(kLibraryVariable);
}

}  // namespace
}  // namespace neap::sim
