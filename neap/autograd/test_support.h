// What the tests of this layer share: a policy that records what becomes of its hooks, and a small network.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "neap/autograd/saved_tensor_scope.h"
#include "neap/autograd/version_stamp.h"

namespace neap::autograd::testing {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// Hooks that copy each saved tensor, check its version and hand the copy back.
class RecordingPolicy final : public SavedTensorPolicy {
 public:
  struct Log {
    std::atomic<int> made = 0, packed = 0, unpacked = 0, destroyed = 0;
    std::function<void(const Tensor&)> on_pack;
    std::function<void()> on_unpack;
    int live() const { return made - destroyed; }
  };

  std::unique_ptr<SavedVariableHooks> make_hook() override { return std::make_unique<Hook>(log_); }
  Log& log() { return *log_; }

 private:
  struct Hook final : SavedVariableHooks {
    explicit Hook(std::shared_ptr<Log> l) : log(std::move(l)) { ++log->made; }
    ~Hook() override { ++log->destroyed; }
    void call_pack_hook(const Tensor& tensor) override {
      ++log->packed;
      if (log->on_pack) log->on_pack(tensor);
      stamp = VersionStamp(tensor);
      held = tensor.detach().clone();
    }
    Tensor call_unpack_hook() override {
      ++log->unpacked;
      if (log->on_unpack) log->on_unpack();
      stamp.check(held.options(), held.sizes());
      return held;
    }
    std::shared_ptr<Log> log;
    Tensor held;
    VersionStamp stamp;
  };

  // Hooks outlive their policy when the graph does.
  std::shared_ptr<Log> log_ = std::make_shared<Log>();
};

// A decoder block's worth of operators: normalisation, attention on views of one projection, a two-layer MLP.
struct Net {
  static constexpr int64_t kWidth = 16, kHeads = 2;
  Tensors params;

  Net() {
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
             {kWidth}, {kWidth}, {3 * kWidth, kWidth}, {kWidth, kWidth}, {4 * kWidth, kWidth}, {kWidth, 4 * kWidth}}) {
      params.push_back(at::randn(sizes).mul_(0.2).set_requires_grad(true));
    }
  }

  Tensor loss(const Tensor& x) const {
    const int64_t batch = x.size(0), length = x.size(1);
    const Tensor h = at::layer_norm(x, {kWidth}, params[0], params[1]);
    const Tensor qkv =
        at::linear(h, params[2]).view({batch, length, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const Tensor a = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]);
    const Tensor y = x + at::linear(a.transpose(1, 2).reshape({batch, length, kWidth}), params[3]);
    return (y + at::linear(at::gelu(at::linear(y, params[4])), params[5])).pow(2).mean();
  }

  // The gradients of x and of every parameter, taken away.
  Tensors take_grads(Tensor& x) {
    Tensors grads{std::exchange(x.mutable_grad(), Tensor())};
    for (Tensor& p : params) grads.push_back(std::exchange(p.mutable_grad(), Tensor()));
    return grads;
  }
};

inline bool same(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined() || (a[i].defined() && !at::equal(a[i], b[i]))) return false;
  }
  return true;
}

}  // namespace neap::autograd::testing
