// torch-free
#include "neap/sim/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::sim {
namespace {

using ::testing::HasSubstr;

std::string error_of(std::string_view text) {
  return testing::error_of([&] { parse_settings(text); });
}

TEST(SimSettings, ReadEveryKey) {
  const DeviceConfig config = parse_settings(
      "count=2, capacity=512MiB, pinned_capacity=1GiB, d2h=25GB/s, h2d=1.5GB/s, peer=800MB/s, latency=5us, "
      "realtime_copies=true, clock=real, gflops=2000, hbm=200GB/s, kernel_min=1.5us, launch=0, event=250ns, "
      "hazard_check=on, strict_free=true, poison=on");
  EXPECT_EQ(config.devices, 2);
  EXPECT_EQ(config.capacity, Bytes(512 << 20));
  EXPECT_EQ(config.pinned_capacity, Bytes(1 << 30));
  EXPECT_DOUBLE_EQ(config.d2h_gbps, 25);
  EXPECT_DOUBLE_EQ(config.h2d_gbps, 1.5);
  EXPECT_DOUBLE_EQ(config.peer_gbps, 0.8);
  EXPECT_DOUBLE_EQ(config.latency_ns, 5000);
  EXPECT_TRUE(config.realtime_copies);
  EXPECT_EQ(config.clock, Clock::kReal);
  EXPECT_DOUBLE_EQ(config.gflops, 2000);
  EXPECT_DOUBLE_EQ(config.hbm_gbps, 200);
  EXPECT_DOUBLE_EQ(config.kernel_min_ns, 1500);
  EXPECT_DOUBLE_EQ(config.launch_ns, 0);
  EXPECT_DOUBLE_EQ(config.event_ns, 250);
  EXPECT_TRUE(config.hazard_check);
  EXPECT_TRUE(config.strict_free);
  EXPECT_TRUE(config.poison);
}

TEST(SimSettings, ChangeOnlyWhatIsNamed) {
  DeviceConfig base;
  base.d2h_gbps = 3;
  base.poison = true;
  const DeviceConfig config = parse_settings("poison=off", base);
  EXPECT_DOUBLE_EQ(config.d2h_gbps, 3);
  EXPECT_FALSE(config.poison);
  EXPECT_DOUBLE_EQ(parse_settings("", base).d2h_gbps, 3);
  EXPECT_DOUBLE_EQ(parse_settings("d2h=unlimited", base).d2h_gbps, 0);
}

TEST(SimSettings, SayWhatIsWrong) {
  EXPECT_THAT(error_of("capcity=1GiB"), HasSubstr("[NEAP_SIM] expected one of count, capacity, "));
  EXPECT_THAT(error_of("capcity=1GiB"), HasSubstr("found 'capcity'"));
  EXPECT_THAT(error_of("capacity"), HasSubstr("expected key=value, separated by commas"));
  EXPECT_THAT(error_of("poison=on,,poison=on"), HasSubstr("found ''"));
  EXPECT_THAT(error_of("poison=on,poison=on"), HasSubstr("[NEAP_SIM.poison] expected once; found twice"));
  EXPECT_THAT(error_of("capacity=lots"), HasSubstr("[NEAP_SIM.capacity]"));
  EXPECT_THAT(error_of("capacity=0"), HasSubstr("[sim.capacity] expected a size above zero"));
  EXPECT_THAT(error_of("count=two"), HasSubstr("[NEAP_SIM.count] expected a whole number; found 'two'"));
  EXPECT_THAT(error_of("count=9"), HasSubstr("[sim.count] expected 1 to 8; found 9"));
  EXPECT_THAT(error_of("d2h=0GB/s"),
              HasSubstr("[NEAP_SIM.d2h] expected a rate above zero such as 25GB/s, or unlimited"));
  EXPECT_THAT(error_of("hbm=unlimited"), HasSubstr("[NEAP_SIM.hbm] expected a rate above zero"));
  EXPECT_THAT(error_of("latency=-1us"), HasSubstr("[NEAP_SIM.latency] expected a time such as"));
  EXPECT_THAT(error_of("gflops=0"), HasSubstr("[sim.gflops] expected a finite number above zero"));
  EXPECT_THAT(error_of("clock=wall"), HasSubstr("[NEAP_SIM.clock] expected virtual or real; found 'wall'"));
  EXPECT_THAT(error_of("poison=yes"), HasSubstr("[NEAP_SIM.poison] expected true or false; found 'yes'"));
}

TEST(SimSettings, RejectNumbersThatAreNotWholly) {
  for (const char* bad : {"d2h=25", "d2h=GB/s", "d2h=nanGB/s", "d2h=25GB/s/s", "latency=5", "latency=5min",
                          "latency=inf", "gflops=5x", "gflops=", "count=1.5", "kernel_min=1e400ns"})
    EXPECT_NE(error_of(bad), testing::kNoError) << bad;
}

TEST(SimSettings, ComeFromTheEnvironment) {
  unsetenv(kSettingsVariable);
  EXPECT_EQ(settings_from_environment().devices, 1);
  setenv(kSettingsVariable, "count=3", 1);
  EXPECT_EQ(settings_from_environment().devices, 3);
  unsetenv(kSettingsVariable);
}

}  // namespace
}  // namespace neap::sim
