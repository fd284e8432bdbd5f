#include "neap/train/adapters.h"

#include <map>
#include <utility>

#include "neap/base/error.h"
#include "neap/models/lora.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/progress.h"

namespace neap::train {

Adapters::Adapters(torch::nn::Module& model, const LoraSection& lora, uint64_t seed) : model_(model) {
  if (lora.adapter.empty()) {
    options_ = {.rank = lora.rank, .alpha = lora.alpha, .dropout = lora.dropout, .modules = lora.modules};
    options_.modules = models::add_lora(model, options_, seed);
  } else {
    options_ = models::load_lora(model, lora.adapter);
  }
  for (const auto& [name, tensor] : models::lora_state(model)) parameters_ += tensor.numel();
}

void Adapters::save(const std::filesystem::path& dir, const std::string& base_model, shard::Sharded* sharded,
                    bool writes) const {
  models::NamedTensors adapters;
  if (sharded == nullptr) {
    adapters = models::lora_state(model_);
  } else {
    for (auto& [name, tensor] : sharded->full_state()) {
      if (models::is_lora_parameter(name)) adapters.emplace_back(name, std::move(tensor));
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
