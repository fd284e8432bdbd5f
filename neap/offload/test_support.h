// What the tests of this layer share: chains of small units on any device, and a run of them to compare.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "neap/offload/engine.h"
#include "testing/matchers.h"
#include "testing/sim_fixture.h"
#include "testing/small_models.h"

namespace neap::offload::testing {

using neap::testing::bit_equal;
using neap::testing::FunctionUnits;
using neap::testing::kSim;
using neap::testing::on_sim;
using Tensors = std::vector<at::Tensor>;

// Drawn on the CPU, so that the bits are the same on every device.
inline at::Tensor draw(at::IntArrayRef sizes, c10::Device device = c10::Device(kSim, 0)) {
  return (at::randn(sizes) * 0.2).to(device);
}
inline at::Tensor weight(at::IntArrayRef sizes, c10::Device device = c10::Device(kSim, 0)) {
  return draw(sizes, device).set_requires_grad(true);
}

inline Options all_sizes(Options options = {}) {
  options.min_bytes = Bytes(0);
  return options;
}

inline int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Units x → tanh(x · w). Each saves two storages: what comes in and what goes out; what goes out of one comes into the
// next and is one storage.
struct Chain {
  static constexpr int64_t kSide = 32;
  static constexpr int64_t kBytes = kSide * kSide * 4;  // of one storage

  explicit Chain(int64_t units, c10::Device device = c10::Device(kSim, 0)) {
    at::manual_seed(17);
    std::vector<FunctionUnits::Body> bodies;
    for (int64_t i = 0; i < units; ++i) {
      weights.push_back(weight({kSide, kSide}, device));
      bodies.push_back([w = weights.back()](const at::Tensor& x) { return at::tanh(at::matmul(x, w)); });
    }
    input = draw({kSide, kSide}, device);
    model = std::make_unique<FunctionUnits>(std::move(bodies));
  }

  at::Tensor loss() const { return model->forward(input).sum(); }
  // Gradients of one step, and the loss; on the CPU.
  Tensors step() const {
    const at::Tensor value = loss();
    value.backward();
    Tensors results = {value.detach().cpu()};
    for (const at::Tensor& w : weights) {
      results.push_back(w.grad().cpu());
      w.mutable_grad().reset();
    }
    return results;
  }

  Tensors weights;
  at::Tensor input;
  std::unique_ptr<FunctionUnits> model;
};

class OffloadTest : public neap::testing::SimTest {
 protected:
  static neap::sim::Counters counted() {
    synchronize();
    return control().counters(0);
  }
};

}  // namespace neap::offload::testing
