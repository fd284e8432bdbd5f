// Training in pieces and in one process, for comparing them, and small models to do it with.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/shard/fully_shard.h"
#include "testing/ranks.h"

namespace neap::testing {

// A fresh model, the same each time, and its loss on a micro-batch.
struct TestModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(int64_t micro_batch)> loss;
};

struct Recipe {
  std::function<TestModel(int rank)> model;  // called for all ranks before any of them starts
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> optimizer;
  int ranks = 2;
  int64_t steps = 5;
  int64_t micro_batches = 1;  // per rank and step
  bool no_sync = false;       // for all micro-batches but the last
  comm::MeshOptions mesh;
  shard::Options options;
  // Called on each rank in each step when the gradients are there.
  std::function<void(shard::Sharded&, int rank)> after_backward;
  // Called on each rank when it is done, before the model goes.
  std::function<void(shard::Sharded&, TestModel&, int rank)> at_end;
};

struct Trained {
  std::vector<at::Tensor> losses;  // steps × micro-batches, in the order of the ranks within each
  std::map<std::string, at::Tensor> parameters;
};

// One process that runs every rank's micro-batches: those of one rank add up first when gradients are kept full on it
// (no_sync), else the ranks' gradients add up first. Replicas add up last.
Trained train_alone(const Recipe& recipe);
// Ranks as threads. The parameters are rank 0's full state.
Trained train_sharded(const Recipe& recipe);

std::unique_ptr<torch::optim::Optimizer> make_sgd(const std::vector<at::Tensor>& parameters);
std::unique_ptr<torch::optim::Optimizer> make_adamw(const std::vector<at::Tensor>& parameters);

::testing::AssertionResult bit_equal(const Trained& a, const Trained& b);

// A decoder of the testing library, small.
TestModel rotary_decoder(c10::Device device = c10::Device(c10::kCPU));

// A unit made of parameters and a function of them.
class TestUnit : public torch::nn::Module, public autograd::Hookable {
 public:
  using Body = std::function<at::Tensor(const std::vector<at::Tensor>& parameters, const at::Tensor& x)>;

  TestUnit(const std::vector<at::Tensor>& parameters, Body body);
  at::Tensor forward(const at::Tensor& x);
  // Around its hooks, as nobody should.
  at::Tensor body(const at::Tensor& x) const { return body_(parameters_, x); }
  at::Tensor& parameter(std::size_t i) { return parameters_[i]; }

 private:
  std::vector<at::Tensor> parameters_;
  Body body_;
};

// layers.0, layers.1, … one after the other, then a mean of squares over [4, width] random inputs of each micro-batch.
class TestNet : public torch::nn::Module {
 public:
  static constexpr int64_t kWidth = 8;

  explicit TestNet(std::vector<std::shared_ptr<TestUnit>> units);
  static at::Tensor input(int64_t micro_batch);
  at::Tensor loss(int64_t micro_batch);
  TestUnit& unit(std::size_t i) { return *units_[i]; }

 private:
  std::vector<std::shared_ptr<TestUnit>> units_;
};

TestModel test_model(const std::shared_ptr<TestNet>& net);
// A parameter with the same values for the same seed.
at::Tensor parameter(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kFloat);
// x @ w.t(), then tanh: w is [kWidth, kWidth].
std::shared_ptr<TestUnit> dense_unit(uint64_t seed);

// What the error of `body` says; fails the test when there is none.
std::string message_of(const std::function<void()>& body);

}  // namespace neap::testing
