// Registering sim in a process: refused beside another accelerator, harmless until asked for.
#include <ATen/Functions.h>
#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <iostream>

#include "neap/base/error.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

class BackendDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }  // a fresh process for each statement
};

TEST_F(BackendDeathTest, RefusesAProcessThatHasAnotherDevice) {
  const auto load_second = [] {
    c10::register_privateuse1_backend("other");
    try {
      sim_control();
    } catch (const UserError& error) {
      std::cerr << error.what();
      _exit(3);
    }
    _exit(0);
  };
  EXPECT_EXIT(load_second(), ::testing::ExitedWithCode(3), "found 'other'");
}

TEST_F(BackendDeathTest, LinkingTheLibraryRegistersNothing) {
  EXPECT_EXIT(_exit(c10::is_privateuse1_backend_registered() ? 1 : 0), ::testing::ExitedWithCode(0), "");
}

class Backend : public SimTest {};

TEST_F(Backend, IsKnownByItsName) {
  EXPECT_EQ(c10::Device("sim:1"), sim(1));
  EXPECT_EQ(sim(1).str(), "sim:1");
}

TEST_F(Backend, KeepsItsNumberOfDevicesOnceUsed) {
  (void)at::empty({1}, sim());
  EXPECT_THROW(configure([](sim::DeviceConfig& config) { config.devices = 3; }), UserError);
  EXPECT_THROW(control().memory(7), UserError);
}

}  // namespace
}  // namespace neap::testing
