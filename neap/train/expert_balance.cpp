#include "neap/train/expert_balance.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "neap/base/error.h"
#include "neap/comm/world.h"
#include "neap/models/mixture_of_experts.h"

namespace neap::train {

ExpertBalance::ExpertBalance(std::vector<models::MixtureOfExperts*> layers, double rate, comm::World* world)
    : layers_(std::move(layers)), rate_(rate), world_(world) {
  NEAP_ASSERT(!layers_.empty(), "a model without experts has nothing to balance");
}

void ExpertBalance::begin_step() {
  for (models::MixtureOfExperts* layer : layers_) layer->take_load();
}

ExpertBalance::Load ExpertBalance::end_step(bool update) {
  const at::NoGradGuard no_grad;
  Load load;
  for (models::MixtureOfExperts* layer : layers_) load.push_back(layer->take_load());
  const auto count = static_cast<int64_t>(load.front().size());
  const at::Tensor total = at::empty({static_cast<int64_t>(load.size()), count}, at::kLong);
  for (std::size_t i = 0; i < load.size(); ++i)
    std::ranges::copy(load[i], total[static_cast<int64_t>(i)].data_ptr<int64_t>());
  if (world_ != nullptr) {
    world_->all().all_reduce(total, {.op = comm::ReduceOp::kSum}, "expert load").wait();
    for (std::size_t i = 0; i < load.size(); ++i)
      std::copy_n(total[static_cast<int64_t>(i)].const_data_ptr<int64_t>(), count, load[i].begin());
  }
  if (!update || rate_ == 0) return load;
  // In integers, load against mean is count * load against sum.
  const at::Tensor step = (total.sum(1, /*keepdim=*/true) - total * count).sign().to(at::kFloat).mul_(rate_);
  const at::Tensor here = step.to(layers_.front()->router().e_score_correction_bias.device());
  for (std::size_t i = 0; i < layers_.size(); ++i)
    layers_[i]->router().e_score_correction_bias.add_(here[static_cast<int64_t>(i)]);
  return load;
}

}  // namespace neap::train
