#include "neap/models/mtp_layer.h"

#include <ATen/ops/cat.h>

namespace neap::models {

SharedHead::SharedHead(const ModelConfig& config, at::TensorOptions options)
    : norm_(register_module("norm", std::make_shared<RmsNorm>(config.hidden_size, config.rms_norm_eps, options))) {}

MtpLayer::MtpLayer(const ModelConfig& config, int64_t depth, at::TensorOptions options)
    : DecoderLayer(config, config.num_hidden_layers + depth - 1, options) {
  const int64_t hidden = config.hidden_size;
  const auto norm = [&](const char* name) {
    return register_module(name, std::make_shared<RmsNorm>(hidden, config.rms_norm_eps, options));
  };
  enorm_ = norm("enorm");
  hnorm_ = norm("hnorm");
  eh_proj_ = register_module("eh_proj", std::make_shared<Linear>(2 * hidden, hidden, /*with_bias=*/false, options));
  shared_head_ = register_module("shared_head", std::make_shared<SharedHead>(config, options));
}

at::Tensor MtpLayer::forward(const at::Tensor& hidden, const at::Tensor& next, const RotaryTables& rotary,
                             const at::Tensor& mask) {
  return hook_point().run(*this, {hidden, next, rotary.cos, rotary.sin, mask}, &MtpLayer::further);
}

at::Tensor MtpLayer::further(const at::Tensor& hidden, const at::Tensor& next, const at::Tensor& cos,
                             const at::Tensor& sin, const at::Tensor& mask) const {
  const at::Tensor both = at::cat({enorm_->forward(next), hnorm_->forward(hidden)}, -1);
  return shared_head_->normalised(body(eh_proj_->forward(both), cos, sin, mask));
}

}  // namespace neap::models
