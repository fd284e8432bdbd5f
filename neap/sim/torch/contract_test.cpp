// The contract of a device, kept by sim on both of its clocks.
#include "testing/device_contract.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

class HeldLinks {
 public:
  void resume() {
    out_.resume();
    in_.resume();
  }

 private:
  HeldCopies out_{0, sim::Link::kDeviceToHost}, in_{0, sim::Link::kHostToDevice};
};

struct SimDevice {
  using Fixture = SimTest;
  static constexpr auto kType = kSim;
  static constexpr bool kHoldsExactly = true;
  static HeldLinks hold_copies() { return {}; }
};

class RealClockTest : public SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    use_clock(sim::Clock::kReal);
  }
};

struct SimDeviceInRealTime : SimDevice {
  using Fixture = RealClockTest;
};

INSTANTIATE_TYPED_TEST_SUITE_P(Sim, DeviceContract, SimDevice);
INSTANTIATE_TYPED_TEST_SUITE_P(SimInRealTime, DeviceContract, SimDeviceInRealTime);

}  // namespace
}  // namespace neap::testing
