#include "testing/tiny_llama.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <cmath>
#include <limits>

namespace neap::testing {
namespace {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight) {
  return x * at::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true) + 1e-5) * weight;
}

}  // namespace

TinyLlama::TinyLlama(const TinyLlamaConfig& config, c10::Device device, at::ScalarType dtype)
    : config_(config), device_(device) {
  auto generator = at::detail::createCPUGenerator(config.seed);
  const auto add = [&](at::IntArrayRef size, bool norm = false) {
    const auto drawn = at::randn(size, generator);
    const auto value = norm ? 1 + 0.1 * drawn : 0.05 * drawn;
    parameters_.push_back(value.to(device, dtype).set_requires_grad(true));
  };
  const auto& c = config_;
  add({c.vocabulary, c.width});
  add({c.width}, /*norm=*/true);
  add({c.vocabulary, c.width});
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    add({c.width}, /*norm=*/true);
    for (int i = 0; i < 4; ++i) add({c.width, c.width});
    add({c.width}, /*norm=*/true);
    add({c.mlp_width, c.width});
    add({c.mlp_width, c.width});
    add({c.width, c.mlp_width});
  }
  const auto head = c.width / c.heads;
  const auto frequencies = at::pow(10000.0, at::arange(0, head, 2, at::kFloat) / -static_cast<double>(head));
  auto angles = at::outer(at::arange(c.sequence, at::kFloat), frequencies);
  angles = at::cat({angles, angles}, -1);
  cos_ = angles.cos().to(device, dtype);
  sin_ = angles.sin().to(device, dtype);
  mask_ = at::full({c.sequence, c.sequence}, -std::numeric_limits<float>::infinity()).triu(1).to(device, dtype);
}

at::Tensor TinyLlama::tokens(uint64_t number) const {
  auto generator = at::detail::createCPUGenerator(1000 + number);
  return at::randint(0, config_.vocabulary, {config_.batch, config_.sequence}, generator, at::kLong).to(device_);
}

at::Tensor TinyLlama::rotate(const at::Tensor& heads) const {
  const auto half = heads.size(-1) / 2;
  const auto turned = at::cat({-heads.narrow(-1, half, half), heads.narrow(-1, 0, half)}, -1);
  return heads * cos_ + turned * sin_;
}

at::Tensor TinyLlama::attention(const at::Tensor& normed, const at::Tensor* weights) const {
  const auto& c = config_;
  const auto head = c.width / c.heads;
  const auto split = [&](const at::Tensor& t) {
    return t.view({normed.size(0), c.sequence, c.heads, head}).transpose(1, 2);
  };
  const auto q = rotate(split(at::linear(normed, weights[0])));
  const auto k = rotate(split(at::linear(normed, weights[1])));
  const auto v = split(at::linear(normed, weights[2]));
  at::Tensor out;
  if (c.fused_attention) {
    out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
  } else {
    const auto scores = at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(head)) + mask_;
    out = at::matmul(scores.softmax(-1), v);
  }
  return at::linear(out.transpose(1, 2).reshape({normed.size(0), c.sequence, c.width}), weights[3]);
}

at::Tensor TinyLlama::block(const at::Tensor& hidden, int64_t layer) const {
  const at::Tensor* w = &parameters_[static_cast<std::size_t>(3 + 9 * layer)];
  const auto mixed = hidden + attention(rms_norm(hidden, w[0]), w + 1);
  const auto normed = rms_norm(mixed, w[5]);
  return mixed + at::linear(at::silu(at::linear(normed, w[6])) * at::linear(normed, w[7]), w[8]);
}

at::Tensor TinyLlama::loss(const at::Tensor& tokens, const std::function<void(const at::Tensor&)>& after_block) const {
  auto hidden = at::embedding(parameters_[0], tokens);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    hidden = block(hidden, layer);
    if (after_block) after_block(hidden);
  }
  const auto logits = at::linear(rms_norm(hidden, parameters_[1]), parameters_[2]);
  return at::cross_entropy_loss(logits.view({-1, config_.vocabulary}), tokens.roll(-1, 1).view({-1}));
}

std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& p : parameters) result.push_back(p.grad());
  return result;
}

}  // namespace neap::testing
