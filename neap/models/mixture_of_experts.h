// The mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), in place of a layer's mlp.
//
// Each token passes the shared experts and a few of many routed ones. A sigmoid scores token and expert; the choice is
// made by score plus a bias of the expert, among the best groups of experts, the weights by the score alone. The bias
// is no parameter: gradients do not reach it, and who trains moves it so that experts have equally much to do.
#pragma once

#include <memory>
#include <vector>

#include "neap/base/mutex.h"
#include "neap/models/layers.h"
#include "neap/models/routed_experts.h"

namespace neap::models {

class Router : public torch::nn::Module {
 public:
  Router(const ModelConfig& config, at::TensorOptions options);
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  struct Choice {
    at::Tensor weights;  // [tokens, per_token], float32 at least
    at::Tensor experts;  // [tokens, per_token], int64
  };
  Choice forward(const at::Tensor& tokens) const;  // [tokens, hidden]
  void place_buffers(c10::Device device);          // see CausalLM

  at::Tensor weight;  // [experts, hidden]
  // [experts]: a buffer, float32 whatever the model is made in. The module's own slot, the only one.
  at::Tensor& e_score_correction_bias;

 private:
  at::Tensor choose(const at::Tensor& scores) const;

  ExpertsConfig config_;
};

// The matrices of all routed experts, stacked, as transformers 5 has them: two parameters of a layer to shard, to
// gather and to step, whatever the number of experts. Files have them expert by expert (hugging_face.h).
class Experts : public torch::nn::Module {
 public:
  Experts(const ModelConfig& config, at::TensorOptions options);

  at::Tensor gate_up_proj;  // [experts, 2 * size, hidden]
  at::Tensor down_proj;     // [experts, hidden, size]
};

class MixtureOfExperts : public FeedForwardUnit {
 public:
  // REQUIRES: config.experts.
  MixtureOfExperts(const ModelConfig& config, at::TensorOptions options);

  Router& router() { return *gate_; }
  // How many tokens each expert was given since the last call, in forwards that record a graph; the second run of a
  // recomputed unit is not counted. A token counts once for each of its experts. Thread-safe.
  std::vector<int64_t> take_load() NEAP_EXCLUDES(mutex_);

 private:
  at::Tensor body(const at::Tensor& x) const override NEAP_EXCLUDES(mutex_);
  void count(const std::vector<int64_t>& load) const NEAP_EXCLUDES(mutex_);

  std::shared_ptr<Router> gate_;
  std::shared_ptr<Experts> experts_;
  std::shared_ptr<Mlp> shared_experts_;
  mutable Mutex mutex_;
  mutable std::vector<int64_t> load_ NEAP_GUARDED_BY(mutex_);
};

}  // namespace neap::models
