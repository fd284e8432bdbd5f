// torch-free
// The simulated device described in text:
// NEAP_SIM="count=2,capacity=512MiB,d2h=25GB/s,h2d=25GB/s,latency=5us,clock=virtual".
//
//   count                  devices, 1 to 8
//   capacity               bytes per device: 512MiB, 1.5GiB
//   pinned_capacity        bytes of page-locked host memory, or unlimited
//   d2h, h2d, peer, hbm    a rate: 25GB/s, 800MiB/s; the first three also: unlimited
//   latency, kernel_min, launch, event   a time: 5us, 250ns, 0
//   gflops                 a number, 10^9 operations per second
//   clock                  virtual or real
//   realtime_copies, hazard_check, strict_free, poison   true or false (on, off)
//
// What each means is said at its field of DeviceConfig (control.h). Everything that cannot be understood is a UserError
// that names the key, what was expected and what was found.
#pragma once

#include <string_view>

#include "neap/sim/control.h"

namespace neap::sim {

inline constexpr const char* kSettingsVariable = "NEAP_SIM";

// Sets one field. `where` stands before the key in errors: "NEAP_SIM", "device".
void apply_setting(DeviceConfig& config, std::string_view key, std::string_view value, std::string_view where);

// `base` changed by a list of key=value, separated by commas. Each key at most once; an empty text changes nothing.
DeviceConfig parse_settings(std::string_view text, const DeviceConfig& base = {},
                            std::string_view where = kSettingsVariable);

// `base` changed by the environment variable, if it is set.
DeviceConfig settings_from_environment(const DeviceConfig& base = {});

}  // namespace neap::sim
