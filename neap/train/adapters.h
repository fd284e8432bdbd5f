// What a run with adapters (the section lora) has beside one without: it trains them alone, and leaves them as a
// directory that PEFT loads.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "neap/models/lora_options.h"
#include "neap/train/config.h"

namespace neap::shard {
class Sharded;
}

namespace neap::train {

class Adapters {
 public:
  // Freezes the model and puts adapters into it: new ones, drawn from `seed`, or those of lora.adapter. Before
  // sharding. UserError for modules that are not there and for an adapter of another model.
  Adapters(torch::nn::Module& model, const LoraSection& lora, uint64_t seed);

  // Writes adapter_config.json and adapter_model.safetensors. With `sharded` collective; rank 0 (`writes`) leaves the
  // files.
  void save(const std::filesystem::path& dir, const std::string& base_model, shard::Sharded* sharded,
            bool writes) const;

  // For the heading: "rank 8, alpha 16, 14 modules, 0.5 M parameters".
  std::string describe() const;

 private:
  torch::nn::Module& model_;
  models::LoraOptions options_;  // modules by their whole names
  int64_t parameters_ = 0;
};

}  // namespace neap::train
