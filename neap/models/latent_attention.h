// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//
// Computed as in training: keys and values of all heads are made from the latent vector, and attention itself is that
// of any other model. What backward keeps is as large as without latents; the saving is in parameters, and in a cache
// of keys that training has not.
#pragma once

#include "neap/models/layers.h"

namespace neap::models {

// Causal. REQUIRES: config.latent_attention.
class LatentAttention : public AttentionUnit {
 public:
  LatentAttention(const ModelConfig& config, at::TensorOptions options);

 private:
  at::Tensor body(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  const at::Tensor& mask) const override;
  at::Tensor queries(const at::Tensor& x) const;  // [batch, sequence, heads * qk_head_dim]

  LatentAttentionConfig config_;
  int64_t heads_;
  double scale_;
  std::shared_ptr<Linear> q_proj_;  // null with a q_lora_rank
  std::shared_ptr<Linear> q_a_proj_, q_b_proj_;
  std::shared_ptr<RmsNorm> q_a_layernorm_;
  std::shared_ptr<Linear> kv_a_proj_with_mqa_, kv_b_proj_, o_proj_;
  std::shared_ptr<RmsNorm> kv_a_layernorm_;
};

}  // namespace neap::models
