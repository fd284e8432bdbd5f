#include "neap/recompute/internal/generators.h"

#include <ATen/Context.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/base/mutex.h"

namespace neap::recompute::internal {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// States are byte tensors on the CPU, whatever the device.
bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Which thread has put which generator back in time.
class Leases {
 public:
  void take(const c10::GeneratorImpl* generator) {
    const MutexLock lock(mutex_);
    const auto mine = [&]() NEAP_REQUIRES(mutex_) {
      const auto lease = holders_.find(generator);
      return lease == holders_.end() || lease->second.thread == std::this_thread::get_id();
    };
    NEAP_CHECK(changed_.wait_for(mutex_, std::chrono::minutes(1), mine),
               "[recompute] expected to put the generator of ", generator->device(),
               " back for a second run; found another thread inside a second run that draws from it for a minute; "
               "give the threads processes of their own, or units without random numbers");
    Lease& lease = holders_[generator];
    lease.thread = std::this_thread::get_id();
    ++lease.depth;
  }

  void give_back(const c10::GeneratorImpl* generator) {
    const MutexLock lock(mutex_);
    const auto lease = holders_.find(generator);
    if (--lease->second.depth == 0) holders_.erase(lease);
    changed_.notify_all();
  }

 private:
  struct Lease {
    std::thread::id thread;
    int depth = 0;  // a rerun may go back to an earlier state than the rerun around it
  };
  Mutex mutex_;
  CondVar changed_;
  std::map<const c10::GeneratorImpl*, Lease> holders_ NEAP_GUARDED_BY(mutex_);
};

Leases& leases() {
  static auto& all = *new Leases;  // backward may run while the process ends
  return all;
}

}  // namespace

GeneratorStates::GeneratorStates(at::ArrayRef<c10::Device> devices) {
  states_.reserve(devices.size());
  for (const c10::Device device : devices) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    states_.push_back({generator, state_of(generator)});
  }
}

void GeneratorStates::keep_used() {
  std::erase_if(states_, [](const State& state) { return same_state(state.value, state_of(state.generator)); });
}

class GeneratorRewind::One {
 public:
  explicit One(const GeneratorStates::State& to) : generator_(to.generator) {
    leases().take(generator_.unsafeGetGeneratorImpl());
    try {
      before_ = state_of(generator_);
      set_state(generator_, to.value);
    } catch (...) {
      leases().give_back(generator_.unsafeGetGeneratorImpl());
      throw;
    }
  }
  ~One() {
    try {
      set_state(generator_, before_);
    } catch (const std::exception& error) {
      log_error("[recompute] the generator of ", generator_.device(), " could not be put back: ", error.what());
    }
    leases().give_back(generator_.unsafeGetGeneratorImpl());
  }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

GeneratorRewind::GeneratorRewind(const GeneratorStates& to) {
  for (const GeneratorStates::State& state : to.all()) rewound_.push_back(std::make_unique<One>(state));
}
GeneratorRewind::~GeneratorRewind() = default;

}  // namespace neap::recompute::internal
