// torch-free
// A library like libneap_sim.so, without a device, for the loader's tests: it remembers its configuration, and refuses
// to be used while the environment variable NEAP_SIM_TEST_REFUSES is set.
#include <cstdlib>

#include "neap/base/error.h"
#include "neap/sim/control.h"

namespace neap::sim {
namespace {

class ControlWithoutDevice final : public Control {
 public:
  void configure(const DeviceConfig& config) override { config_ = config; }
  DeviceConfig config() const override { return config_; }
  MemoryStats memory(int) const override { return {}; }
  MemoryStats pinned_memory() const override { return {}; }
  void reset_peak(int) override {}
  void reset_pinned_peak() override {}
  Counters counters(int) const override { return {}; }
  void reset_counters(int) override {}
  int64_t host_time_ns(int) const override { return 0; }
  std::vector<std::string> take_hazards() override { return {}; }
  void host_read(const void*, int64_t, const char*) override {}
  void host_write(const void*, int64_t, const char*) override {}
  void set_recorder(trace::Recorder*) override {}
  void manual_seed(uint64_t, int) override {}
  void run_on_stream(int, int64_t, HostTask) override {}
  void pause(int, Link) override {}
  void resume(int, Link) override {}

 private:
  DeviceConfig config_;
};

}  // namespace

#ifndef NEAP_SIM_TEST_WITHOUT_ENTRY
extern "C" Control& neap_sim_control_v3() {
  NEAP_CHECK(std::getenv("NEAP_SIM_TEST_REFUSES") == nullptr, "another accelerator is active");
  static ControlWithoutDevice control;
  return control;
}
#endif

}  // namespace neap::sim
