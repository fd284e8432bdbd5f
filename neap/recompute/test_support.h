// What the tests of this layer share: a block with dropout, and ways to train it.
#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "neap/autograd/saved_tensor_scope.h"
#include "neap/recompute/region.h"
#include "testing/error_of.h"
#include "testing/matchers.h"

namespace neap::recompute::testing {

using at::Tensor;
using neap::testing::bit_equal;
using ::testing::HasSubstr;
using Inputs = at::ArrayRef<Tensor>;

// Attention and mlp with dropout after each. Counts the calls that begin and that reach the end.
class Block {
 public:
  static constexpr int64_t kWidth = 16, kHeads = 2;

  explicit Block(c10::Device device = c10::kCPU) {
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
             {kWidth}, {kWidth}, {3 * kWidth, kWidth}, {kWidth, kWidth}, {4 * kWidth, kWidth}, {kWidth, 4 * kWidth}}) {
      parameters.push_back((at::randn(sizes) * 0.2).to(device).set_requires_grad(true));
    }
  }

  Tensor attention(const Tensor& x) const {
    const auto h = at::layer_norm(x, {kWidth}, parameters[0], parameters[1]);
    const auto qkv =
        at::linear(h, parameters[2]).view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const auto scores = at::matmul(qkv[0], qkv[1].transpose(-2, -1)).softmax(-1);
    const auto mixed = at::matmul(scores, qkv[2]).transpose(1, 2).reshape(x.sizes());
    return x + at::dropout(at::linear(mixed, parameters[3]), 0.1, true);
  }
  Tensor mlp(const Tensor& x) const {
    return x + at::dropout(at::linear(at::gelu(at::linear(x, parameters[4])), parameters[5]), 0.1, true);
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    const Tensor y = mlp(attention(x));
    ++completed;
    return y;
  }
  // Two regions within.
  Tensor nested(const Tensor& x) {
    ++calls;
    Tensor y = region([this](Inputs in) -> TensorList { return {attention(in[0])}; }, {x})[0];
    y = region([this](Inputs in) -> TensorList { return {mlp(in[0])}; }, {y})[0];
    ++completed;
    return y;
  }

  TensorList parameters;
  int calls = 0, completed = 0;
};

enum class Way { kPlain, kRegions, kNested };

// Three blocks and a loss.
class Net {
 public:
  explicit Net(c10::Device device = c10::kCPU) : blocks(3, Block(device)) {
    for (Block& block : blocks) block = Block(device);
    x = at::randn({2, 8, Block::kWidth}).to(device).set_requires_grad(true);
  }

  // From the same random numbers each time.
  Tensor loss(Way way, const RegionOptions& options = {}) {
    at::manual_seed(9);
    Tensor h = x;
    for (Block& block : blocks) {
      if (way == Way::kPlain) {
        h = block.forward(h);
      } else {
        const auto body = [&block, way](Inputs in) -> TensorList {
          return {way == Way::kNested ? block.nested(in[0]) : block.forward(in[0])};
        };
        h = region(body, {h}, options)[0];
      }
    }
    return h.pow(2).mean();
  }
  TensorList leaves() const {
    TensorList all = {x};
    for (const Block& block : blocks) all.insert(all.end(), block.parameters.begin(), block.parameters.end());
    return all;
  }
  // Taken away.
  TensorList gradients() {
    TensorList all;
    for (Tensor leaf : leaves()) all.push_back(std::exchange(leaf.mutable_grad(), Tensor()));
    return all;
  }
  TensorList gradients_of(const Tensor& loss) {
    loss.backward();
    return gradients();
  }
  int calls() const { return blocks[0].calls + blocks[1].calls + blocks[2].calls; }
  int completed() const { return blocks[0].completed + blocks[1].completed + blocks[2].completed; }

  std::vector<Block> blocks;
  Tensor x;
};

// One tensor in, one out.
inline Tensor region_of(const std::function<Tensor(const Tensor&)>& fn, const Tensor& x,
                        const RegionOptions& options = {}) {
  return region([fn](Inputs in) -> TensorList { return {fn(in[0])}; }, {x}, options)[0];
}

inline std::string error_of(const std::function<void()>& run) { return neap::testing::error_of<std::exception>(run); }

// Whether the memory behind a tensor is still there.
class Watched {
 public:
  explicit Watched(const Tensor& tensor) : storage_(tensor.storage().getWeakStorageImpl()) {}
  bool alive() const { return !storage_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

}  // namespace neap::recompute::testing
