#include "neap/train/optimizer.h"

#include <unordered_set>

#include "neap/base/error.h"
#include "neap/train/adamw.h"
#include "neap/train/sgd.h"

namespace neap::train {

Optimizer::Optimizer(const std::vector<at::Tensor>& parameters, Decay decay, const std::vector<int64_t>& dimensions) {
  NEAP_ASSERT(dimensions.empty() || dimensions.size() == parameters.size(), dimensions.size(), " dimensions of ",
              parameters.size(), " parameters");
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameters_.push_back(parameter);
    decays_.push_back(decay == Decay::kAll || (dimensions.empty() ? parameter.dim() : dimensions[i]) >= 2);
  }
}

void Optimizer::zero_grad() {
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

Bytes Optimizer::state_bytes() const {
  Bytes total;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (const auto& [name, tensor] : state_of(i)) total += Bytes(static_cast<int64_t>(tensor.nbytes()));
  }
  return total;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimSection& section, const std::vector<at::Tensor>& parameters,
                                          const std::vector<int64_t>& dimensions) {
  if (section.type == OptimType::kSgd) {
    return std::make_unique<Sgd>(parameters,
                                 Sgd::Options{.momentum = section.momentum,
                                              .nesterov = section.nesterov,
                                              .weight_decay = section.weight_decay,
                                              .decay = section.decay},
                                 dimensions);
  }
  return std::make_unique<AdamW>(parameters,
                                 AdamW::Options{.beta1 = section.betas[0],
                                                .beta2 = section.betas[1],
                                                .eps = section.eps,
                                                .weight_decay = section.weight_decay,
                                                .decay = section.decay},
                                 dimensions);
}

}  // namespace neap::train
