// The library's one exported symbol: the program's side of the device (neap/sim/control.h) on the engine.
#include "neap/sim/control.h"

#include <utility>

#include "neap/base/error.h"
#include "neap/sim/torch/backend.h"
#include "neap/sim/torch/generator.h"

namespace neap::sim {
namespace {

class EngineControl final : public Control {
 public:
  void configure(const DeviceConfig& config) override { engine().configure(config); }
  DeviceConfig config() const override { return engine().config(); }

  MemoryStats memory(int device) const override { return engine().memory(checked(device)); }
  MemoryStats pinned_memory() const override { return engine().pinned_memory(); }
  void reset_peak(int device) override { engine().reset_peak(checked(device)); }
  void reset_pinned_peak() override { engine().reset_pinned_peak(); }
  Counters counters(int device) const override { return engine().counters(checked(device)); }
  void reset_counters(int device) override { engine().reset_counters(checked(device)); }
  int64_t host_time_ns(int device) const override { return engine().host_time_ns(checked(device)); }

  std::vector<std::string> take_hazards() override { return engine().take_hazards(); }
  void host_read(const void* data, int64_t bytes, const char* what) override {
    engine().host_read(data, static_cast<std::size_t>(bytes), what);
  }
  void host_write(const void* data, int64_t bytes, const char* what) override {
    engine().host_write(data, static_cast<std::size_t>(bytes), what);
  }
  void set_recorder(trace::Recorder* recorder) override { engine().set_recorder(recorder); }
  void manual_seed(uint64_t seed, int device) override {
    auto generator = default_generator(checked(device));
    generator.set_current_seed(seed);
  }
  void run_on_stream(int device, int64_t stream, HostTask task) override {
    engine().submit_host_task(engine().stream(checked(device), static_cast<int>(stream)), std::move(task));
  }
  void pause(int device, Link link) override { engine().pause(checked(device), link); }
  void resume(int device, Link link) override { engine().resume(checked(device), link); }

 private:
  static int checked(int device) {
    NEAP_CHECK(device >= 0 && device < engine().device_count(), "[sim] expected the index of a device, below ",
               engine().device_count(), "; found ", device);
    return device;
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) Control& neap_sim_control_v3() {
  register_backend();
  static EngineControl control;
  return control;
}

}  // namespace neap::sim
