// The decoder layer of the Llama family and its parts, as torch modules with the parameter names of Hugging Face.
//
// A module is not thread-safe while its parameters change; concurrent forwards are fine. Constructors leave parameters
// uninitialised: CausalLM::init_weights() or load_hf() fills them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "neap/autograd/hook_point.h"
#include "neap/models/functions.h"
#include "neap/models/llama_config.h"

namespace neap::models {

class Linear : public torch::nn::Module {
 public:
  Linear(int64_t in, int64_t out, bool with_bias, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight;
  at::Tensor bias;  // undefined without bias
};

class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(int64_t size, double eps, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x) const { return rms_norm(x, weight, eps_); }

  at::Tensor weight;

 private:
  double eps_;
};

// Causal grouped-query attention. Keys and values stay at their own number of heads, also in what backward keeps.
class Attention : public torch::nn::Module, public autograd::Hookable {
 public:
  Attention(const LlamaConfig& config, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x, const RotaryTables& rotary);  // [batch, sequence, hidden] in and out

 private:
  at::Tensor body(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) const;

  int64_t head_dim_;
  bool grouped_;
  std::shared_ptr<Linear> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<RmsNorm> q_norm_, k_norm_;  // null unless config.qk_norm
};

class Mlp : public torch::nn::Module, public autograd::Hookable {
 public:
  Mlp(const LlamaConfig& config, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor body(const at::Tensor& x) const;

  std::shared_ptr<Linear> gate_proj_, up_proj_, down_proj_;
};

class DecoderLayer : public torch::nn::Module, public autograd::Hookable {
 public:
  DecoderLayer(const LlamaConfig& config, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& hidden, const RotaryTables& rotary);

 private:
  at::Tensor body(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin) const;

  std::shared_ptr<RmsNorm> input_layernorm_, post_attention_layernorm_;
  std::shared_ptr<Attention> self_attn_;
  std::shared_ptr<Mlp> mlp_;
};

}  // namespace neap::models
