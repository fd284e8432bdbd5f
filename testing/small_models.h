// Small models made to be hard to offload, for tests of what must never change numbers.
//
// RotaryDecoder   a decoder whose rotary tables are computed once and handed to every layer, as in HyperParallel's
//                 issue 664
// HostileModel    units that save views, slices, results of in-place operators, one tensor twice, integers, empty and
//                 0-dim tensors, non-contiguous and channels-last ones
// FunctionUnits   units made of functions that a test writes
//
// Parameters are drawn on the CPU from a seed, so that every device starts with the same bits. They are made on their
// device: torch::nn::Module::to() does not know devices of PrivateUse1.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "neap/autograd/hook_point.h"

namespace neap::testing {

struct RotaryTables {
  at::Tensor cos, sin;
};
template <class Visit>
void visit_tensors(const RotaryTables& tables, Visit&& visit) {
  visit(tables.cos), visit(tables.sin);
}

// How a layer gets its tables. kKeyword: beside the inputs that it declares to its hook point, as a keyword argument
// bypasses hooks that look at positional ones.
enum class Handing { kPositional, kKeyword };

class RotaryLayer : public torch::nn::Module, public autograd::Hookable {
 public:
  RotaryLayer(int64_t dim, int64_t heads, c10::Device device);
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables, Handing handing);

 private:
  at::Tensor body(const at::Tensor& x, const RotaryTables& tables) const;

  int64_t heads_;
  at::Tensor norm_, qkv_, out_, up_, down_;
};

class RotaryDecoder : public torch::nn::Module {
 public:
  struct Shape {
    int64_t layers = 12, dim = 32, heads = 4, vocabulary = 61, batch = 2, sequence = 16;
  };

  RotaryDecoder(Shape shape, c10::Device device, Handing handing = Handing::kPositional);
  // The same data in every run: step n's tokens follow from n alone.
  at::Tensor loss(int64_t step);

  // The tables of the latest forward, still held here while its backward runs, and what they must contain.
  const RotaryTables& tables() const { return tables_; }
  RotaryTables fresh_tables() const;

 private:
  Shape shape_;
  Handing handing_;
  at::Tensor embedding_, head_;
  std::vector<std::shared_ptr<RotaryLayer>> layers_;
  RotaryTables tables_;
};

class HostileUnit : public torch::nn::Module, public autograd::Hookable {
 public:
  HostileUnit(int64_t channels, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& index);

 private:
  at::Tensor body(const at::Tensor& x, const at::Tensor& index) const;

  at::Tensor conv_, project_, scale_;
};

class HostileModel : public torch::nn::Module {
 public:
  HostileModel(int64_t units, at::TensorOptions options);  // device and dtype
  at::Tensor loss(int64_t step);

 private:
  at::TensorOptions options_;
  std::vector<std::shared_ptr<HostileUnit>> units_;
};

// Units made of functions: children layers.0, layers.1, …
class FunctionUnits : public torch::nn::Module {
 public:
  using Body = std::function<at::Tensor(const at::Tensor& x)>;

  explicit FunctionUnits(std::vector<Body> bodies, const std::vector<at::Tensor>& parameters = {});
  at::Tensor forward(at::Tensor x);  // through all, in order
  at::Tensor run(size_t unit, const at::Tensor& x);

 private:
  class Unit;
  std::vector<std::shared_ptr<Unit>> units_;
};

// What a training run left behind, on the CPU.
struct TrainingRecord {
  std::vector<at::Tensor> losses;
  std::vector<std::vector<at::Tensor>> gradients;  // per step, per parameter
  std::vector<at::Tensor> parameters;
};

// Momentum SGD for `steps` steps. `after_step` runs between steps, with gradients cleared.
TrainingRecord train(torch::nn::Module& model, const std::function<at::Tensor(int64_t step)>& loss, int64_t steps,
                     const std::function<void(int64_t step)>& after_step = {});

::testing::AssertionResult bit_equal(const TrainingRecord& a, const TrainingRecord& b);

}  // namespace neap::testing
