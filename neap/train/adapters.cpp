#include "neap/train/adapters.h"

#include <ATen/core/grad_mode.h>

#include <map>
#include <tuple>
#include <utility>

#include "neap/base/error.h"
#include "neap/models/lora.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/progress.h"

namespace neap::train {

Adapters::Adapters(torch::nn::Module& model, const LoraSection& lora, uint64_t seed) : model_(model) {
  models::NamedTensors values;
  if (lora.adapter.empty()) {
    options_ = {.rank = lora.rank, .alpha = lora.alpha, .dropout = lora.dropout, .modules = lora.modules};
    values = models::draw_lora(model, options_, seed);
  } else {
    std::tie(options_, values) = models::read_lora(model, lora.adapter);
  }
  options_.modules = models::add_lora(model, options_, values);
  for (const auto& [name, value] : values) parameters_ += value.numel();
  if (models::lora_state(model).front().second.is_meta()) values_ = std::move(values);
}

void Adapters::fill(const std::vector<shard::Shard>& pieces) {
  const at::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> by_name(values_.begin(), values_.end());
  for (const shard::Shard& piece : pieces) {
    if (!models::is_lora_parameter(piece.name)) continue;
    piece.data.copy_(by_name.at(piece.name).view(-1).narrow(0, piece.begin, piece.end - piece.begin));
  }
  values_.clear();
}

void Adapters::save(const std::filesystem::path& dir, const std::string& base_model, shard::Sharded* sharded,
                    bool writes) const {
  models::NamedTensors adapters;
  if (sharded == nullptr) {
    adapters = models::lora_state(model_);
  } else {
    for (auto& [name, tensor] : sharded->full_state(models::is_lora_parameter)) {
      adapters.emplace_back(name, std::move(tensor));
    }
  }
  if (writes) models::save_lora(adapters, dir, options_, base_model);
}

std::string Adapters::describe() const {
  return neap::internal::concat("rank ", options_.rank, ", alpha ", options_.alpha, ", ", options_.modules.size(),
                                " modules, ", fixed(static_cast<double>(parameters_) * 1e-6, 2),
                                " M parameters; the model's own are frozen");
}

}  // namespace neap::train
