// The models whose training must not change by a bit, and the data of their steps.
#pragma once

#include <ATen/Functions.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <utility>

#include "neap/models/causal_lm.h"
#include "testing/small_models.h"

namespace neap::testing {

using LossOfStep = std::function<at::Tensor(int64_t step)>;

struct Model {
  const char* name;
  // A fresh model on the device, and its loss on the data of a step.
  std::function<std::pair<std::shared_ptr<torch::nn::Module>, LossOfStep>(c10::Device)> make;
};

inline void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

// Two sequences of `length` tokens a step.
inline Model decoder(const char* name, const models::ModelConfig& config, at::ScalarType dtype, int64_t length) {
  return {name, [config, dtype, length](c10::Device device) {
            const auto model = models::make_model(config, at::TensorOptions().device(device).dtype(dtype), /*seed=*/3);
            const auto loss = [model, device, length, tokens = config.vocab_size](int64_t step) {
              const auto numbers = at::arange(2 * (length + 1), at::kLong) * 11 + step * 5;
              const auto ids = numbers.remainder(tokens).view({2, length + 1}).to(device);
              return model->loss(ids.narrow(1, 0, length), ids.narrow(1, 1, length));
            };
            return std::pair<std::shared_ptr<torch::nn::Module>, LossOfStep>(model, loss);
          }};
}

inline Model hostile(const char* name, at::ScalarType dtype) {
  return {name, [dtype](c10::Device device) {
            const auto model = std::make_shared<HostileModel>(4, at::TensorOptions().device(device).dtype(dtype));
            const auto loss = [model](int64_t step) { return model->loss(step); };
            return std::pair<std::shared_ptr<torch::nn::Module>, LossOfStep>(model, loss);
          }};
}

}  // namespace neap::testing
