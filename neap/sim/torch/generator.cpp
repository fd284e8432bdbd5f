#include "neap/sim/torch/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <vector>

#include "neap/sim/torch/backend.h"

namespace neap::sim {
namespace {

class SimGenerator final : public c10::GeneratorImpl {
 public:
  SimGenerator(int device, at::Generator twin)
      : GeneratorImpl(sim_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), twin_(std::move(twin)) {}

  const at::Generator& twin() const { return twin_; }

  // Kernels lock the twin, not this object; so does every access from here.
  void set_current_seed(uint64_t seed) override {
    const std::lock_guard lock(twin_.mutex());
    twin_.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    const std::lock_guard lock(twin_.mutex());
    return twin_.current_seed();
  }
  uint64_t seed() override {
    const std::lock_guard lock(twin_.mutex());
    return twin_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    const std::lock_guard lock(twin_.mutex());
    twin_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const std::lock_guard lock(twin_.mutex());
    return twin_.unsafeGetGeneratorImpl()->get_state();
  }
  // A Mersenne twister has no offset; these throw with torch's own text.
  void set_offset(uint64_t offset) override { twin_.set_offset(offset); }
  uint64_t get_offset() const override { return twin_.get_offset(); }

 private:
  SimGenerator* clone_impl() const override {
    const std::lock_guard lock(twin_.mutex());
    return new SimGenerator(device_.index(), twin_.clone());
  }

  mutable at::Generator twin_;
};

}  // namespace

at::Generator make_generator(int device) {
  return at::make_generator<SimGenerator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>;  // leaked: kernels may run while the process ends
    for (int i = 0; i < kMaxDevices; ++i) all->push_back(make_generator(i));
    return all;
  }();
  return generators->at(static_cast<std::size_t>(device));
}

at::Generator cpu_twin(const at::Generator& generator) {
  return static_cast<const SimGenerator*>(generator.unsafeGetGeneratorImpl())->twin();
}

}  // namespace neap::sim
