// What the tests of public bug reports share. Each file is named after the report it is a test of; a report is a kind
// of bug, not one input.
#pragma once

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "neap/offload/engine.h"
#include "testing/error_of.h"
#include "testing/matchers.h"
#include "testing/sim_fixture.h"
#include "testing/small_models.h"

namespace neap::testing {

using ::testing::HasSubstr;

class IssueTest : public SimTest {
 protected:
  // Everything leaves, and no device memory waits for its copy: the most traffic there can be.
  static offload::Options everything_leaves() {
    offload::Options options;
    options.min_bytes = Bytes(0);
    options.keep_last = 0;
    options.max_in_flight = Bytes(0);
    return options;
  }

  // A leaf on sim, drawn on the CPU.
  static at::Tensor weight(at::IntArrayRef sizes, double scale = 0.5) {
    return (at::randn(sizes) * scale).to(sim()).set_requires_grad(true);
  }

  struct Training {
    std::optional<offload::Options> options = std::nullopt;  // none: no engine
    std::vector<std::string> patterns = {};
    offload::Resources resources = {};
    std::function<void(int64_t step)> after_step = {};
  };
  // Trains a fresh model that `make` makes on sim; it has loss(step). `report` gets the last step's.
  template <class Model>
  static TrainingRecord train_on_sim(const std::function<std::shared_ptr<Model>()>& make, int64_t steps,
                                     const Training& how, offload::StepReport* report = nullptr) {
    const auto model = make();
    std::optional<offload::Engine> engine;
    if (how.options) {
      engine.emplace(*how.options, how.resources);
      engine->attach(*model, how.patterns);
    }
    auto record = train(
        *model, [&](int64_t step) { return model->loss(step); }, steps,
        [&](int64_t step) {
          if (engine && report != nullptr) *report = engine->take_step_report();
          if (how.after_step) how.after_step(step);
        });
    return record;
  }

  // The loss and the gradients of `leaves` after one backward of `loss()`; clears the gradients.
  static std::vector<at::Tensor> differentiate(const std::function<at::Tensor()>& loss,
                                               const std::vector<at::Tensor>& leaves) {
    const auto value = loss();
    value.backward();
    return take_gradients(value, leaves);
  }
  static std::vector<at::Tensor> take_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& leaves) {
    std::vector<at::Tensor> all = {loss.detach().cpu()};
    for (auto leaf : leaves) {
      all.push_back(leaf.grad().defined() ? leaf.grad().cpu() : at::Tensor());
      leaf.mutable_grad().reset();
    }
    return all;
  }
};

}  // namespace neap::testing
