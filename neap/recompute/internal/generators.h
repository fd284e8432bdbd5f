// Random number generators of one run of a region, put back for the next.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <vector>

namespace neap::recompute::internal {

// The default generators of some devices as they were at one moment.
class GeneratorStates {
 public:
  GeneratorStates() = default;
  explicit GeneratorStates(at::ArrayRef<c10::Device> devices);

  // Forgets the generators that nobody has drawn from since: a second run need not touch them.
  void keep_used();
  bool empty() const { return states_.empty(); }

  struct State {
    at::Generator generator;
    at::Tensor value;
  };
  const std::vector<State>& all() const { return states_; }

 private:
  std::vector<State> states_;
};

// While it lives, the generators stand where they stood; afterwards they are where they were before. One thread at a
// time may do that to a generator, so a second thread waits; UserError if it waits for a minute.
// REQUIRES: destroyed on the thread that made it.
class GeneratorRewind {
 public:
  explicit GeneratorRewind(const GeneratorStates& to);
  ~GeneratorRewind();
  GeneratorRewind(const GeneratorRewind&) = delete;
  GeneratorRewind& operator=(const GeneratorRewind&) = delete;

 private:
  class One;
  std::vector<std::unique_ptr<One>> rewound_;
};

}  // namespace neap::recompute::internal
