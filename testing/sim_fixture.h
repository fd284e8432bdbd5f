// A test on the simulated accelerator.
//
//   class Offload : public SimTest {};
//   TEST_F(Offload, MovesNothingWhenTheBudgetIsLarge) { auto x = at::ones({4}, on_sim()); … }
//
// Every test starts with the default test configuration (two devices unless use_sim_devices() said otherwise, hazard
// checker and poison on, links at memcpy speed, the virtual clock), fresh counters and a fixed seed. When it ends, all
// queued work is waited for, and the test fails if the checker found a hazard or if device or pinned bytes are not back
// where they were.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/TensorOptions.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "neap/sim/control.h"

namespace neap::testing {

inline constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

inline c10::Device sim(int index = 0) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }
inline c10::TensorOptions on_sim(int index = 0) { return c10::TensorOptions().device(sim(index)); }
inline c10::TensorOptions pinned() { return c10::TensorOptions().pinned_memory(true); }

// What a test starts with.
sim::DeviceConfig default_config();

// How many devices the tests of this executable have, where two are not enough: a rank that is a thread takes one of
// its own. Called before the first use of sim, by the initialiser of a global: the number is fixed from then on.
bool use_sim_devices(int devices);

// Registers sim in this process on the first call.
sim::Control& sim_control();

// While it lives, copies on one link of a device are queued but do not start. Declared before the tensors it affects,
// it is destroyed after them; resume() earlier where the test waits for the copies.
class HeldCopies {
 public:
  HeldCopies(int device, sim::Link link);
  ~HeldCopies();
  HeldCopies(const HeldCopies&) = delete;
  HeldCopies& operator=(const HeldCopies&) = delete;
  void resume();

 private:
  int device_;
  sim::Link link_;
  bool held_ = true;
};

class SimTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  static sim::Control& control() { return sim_control(); }

  // Changes the configuration for the rest of the test. Nothing may be queued.
  static void configure(const std::function<void(sim::DeviceConfig&)>& change);
  // The links take this long on the device's clock.
  static void throttle_copies(double d2h_gbps, double h2d_gbps, double latency_ns = 1'000);
  static void use_clock(sim::Clock clock);
  // A link that moves nothing until the result is destroyed or resumed.
  [[nodiscard]] static HeldCopies hold_copies(sim::Link link, int device = 0) { return {device, link}; }

  // Bytes that tensors hold on the device now, as asked for.
  static int64_t live_bytes(int device = 0) { return control().memory(device).requested; }
  static void synchronize();

  // For tests of wrong programs: takes what the checker found, so that the test does not fail for it.
  static std::vector<std::string> take_hazards() { return control().take_hazards(); }
  // The bytes live now are the new baseline: for caches that the test fills on purpose.
  void accept_live_bytes();

 private:
  std::vector<sim::MemoryStats> baseline_;  // per device, then pinned memory
};

}  // namespace neap::testing
