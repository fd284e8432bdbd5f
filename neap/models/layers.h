// The parts that decoder layers are made of, as torch modules with the parameter names of Hugging Face.
//
// A module is not thread-safe while its parameters change; concurrent forwards are fine. Constructors leave parameters
// uninitialised: CausalLM::init_weights() or load_hf() fills them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/models/functions.h"
#include "neap/models/model_config.h"

namespace neap::models {

// What somebody adds to the output of a linear layer: an adapter (lora.h).
class LinearAddition {
 public:
  virtual ~LinearAddition() = default;
  // `y` is the layer's own output for `x`.
  virtual at::Tensor add_to(const at::Tensor& y, const at::Tensor& x) const = 0;
};

// scaled_dot_product_attention of [batch, heads, sequence, size], causal unless there is a mask.
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
                  std::optional<double> scale, bool grouped);

class Linear : public torch::nn::Module {
 public:
  Linear(int64_t in, int64_t out, bool with_bias, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x) const;

  // `children` become modules of this one, by name.
  void set_addition(std::shared_ptr<const LinearAddition> addition,
                    const std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>& children);
  const LinearAddition* addition() const { return addition_.get(); }
  // forward() is the product with the weight and no more.
  bool is_plain() const { return addition_ == nullptr && !bias.defined(); }

  at::Tensor weight;
  at::Tensor bias;  // undefined without bias

 private:
  std::shared_ptr<const LinearAddition> addition_;  // null: none
};

class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(int64_t size, double eps, at::TensorOptions options);
  at::Tensor forward(const at::Tensor& x) const { return rms_norm(x, weight, eps_); }

  at::Tensor weight;

 private:
  double eps_;
};

// The first half of a decoder layer, of whatever kind: mixes tokens. A hook point.
class AttentionUnit : public torch::nn::Module, public autograd::Hookable {
 public:
  // [batch, sequence, hidden] in and out. `mask` is added to the scores, as documents.h makes it; undefined: each token
  // attends to all before it.
  at::Tensor forward(const at::Tensor& x, const RotaryTables& rotary, const at::Tensor& mask = {});

 private:
  virtual at::Tensor body(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                          const at::Tensor& mask) const = 0;
};

// The second half of a decoder layer, of whatever kind: works on each token alone. A hook point.
class FeedForwardUnit : public torch::nn::Module, public autograd::Hookable {
 public:
  at::Tensor forward(const at::Tensor& x);  // [batch, sequence, hidden] in and out

 private:
  virtual at::Tensor body(const at::Tensor& x) const = 0;
};

// Causal grouped-query attention. Keys and values stay at their own number of heads, also in what backward keeps.
class Attention : public AttentionUnit {
 public:
  Attention(const ModelConfig& config, at::TensorOptions options);

 private:
  at::Tensor body(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  const at::Tensor& mask) const override;

  int64_t head_dim_;
  bool grouped_;
  std::shared_ptr<Linear> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<RmsNorm> q_norm_, k_norm_;  // null unless config.qk_norm
};

class Mlp : public FeedForwardUnit {
 public:
  Mlp(int64_t hidden_size, int64_t intermediate_size, bool with_bias, at::TensorOptions options);

 private:
  at::Tensor body(const at::Tensor& x) const override;

  std::shared_ptr<Linear> gate_proj_, up_proj_, down_proj_;
};

}  // namespace neap::models
