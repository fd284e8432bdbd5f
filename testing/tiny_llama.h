// A small Llama in plain ATen calls, for tests of the layers below neap/models: real attention, rotary embeddings,
// gated MLP, cross entropy. Weights are drawn on the CPU, so models of one seed are equal on every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <vector>

namespace neap::testing {

struct TinyLlamaConfig {
  int64_t layers = 2, width = 64, heads = 4, mlp_width = 176, vocabulary = 128, batch = 2, sequence = 32;
  bool fused_attention = true;  // scaled_dot_product_attention; else matmul, softmax, matmul
  uint64_t seed = 42;
};

class TinyLlama {
 public:
  TinyLlama(const TinyLlamaConfig& config, c10::Device device, at::ScalarType dtype = at::kFloat);

  const TinyLlamaConfig& config() const { return config_; }
  std::vector<at::Tensor>& parameters() { return parameters_; }
  // A batch of token ids, the same for the same number on every device.
  at::Tensor tokens(uint64_t number) const;

  at::Tensor block(const at::Tensor& hidden, int64_t layer) const;
  // `after_block` sees the output of each layer.
  at::Tensor loss(const at::Tensor& tokens, const std::function<void(const at::Tensor&)>& after_block = {}) const;

 private:
  at::Tensor attention(const at::Tensor& normed, const at::Tensor* weights) const;
  at::Tensor rotate(const at::Tensor& heads) const;

  TinyLlamaConfig config_;
  c10::Device device_;
  std::vector<at::Tensor> parameters_;  // embedding, final norm, head, then nine a layer
  at::Tensor cos_, sin_, mask_;
};

// The gradients of `parameters`, in order.
std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& parameters);

}  // namespace neap::testing
