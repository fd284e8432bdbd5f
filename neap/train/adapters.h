// What a run with adapters (the section lora) has beside one without: it trains them alone, and leaves them as a
// directory that PEFT loads.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "neap/models/lora.h"
#include "neap/models/lora_options.h"
#include "neap/train/config.h"

namespace neap::shard {
class Sharded;
struct Shard;
}  // namespace neap::shard

namespace neap::train {

class Adapters {
 public:
  // Freezes the model and puts adapters into it: new ones, drawn from `seed`, or those of lora.adapter. Before
  // sharding; the model may be without memory (model_in_pieces.h). UserError for modules that are not there and for an
  // adapter of another model.
  Adapters(torch::nn::Module& model, const LoraSection& lora, uint64_t seed);

  // Of a model without memory, which has been cut since: this rank's pieces, with the bits that the whole would have.
  void fill(const std::vector<shard::Shard>& pieces);

  // Writes adapter_config.json and adapter_model.safetensors. With `sharded` collective; rank 0 (`writes`) leaves the
  // files.
  void save(const std::filesystem::path& dir, const std::string& base_model, shard::Sharded* sharded,
            bool writes) const;

  // What a run that goes on has to have in common with the one before: rank, alpha, dropout and modules, and of
  // lora.adapter the values. By the keys of the run file.
  std::map<std::string, std::string> description() const;

  // For the heading: "rank 8, alpha 16, 14 modules, 0.5 M parameters".
  std::string describe() const;

 private:
  torch::nn::Module& model_;
  models::LoraOptions options_;  // modules by their whole names
  models::NamedTensors values_;  // for fill(), whole; adapters are small
  int64_t parameters_ = 0;
  std::string checksum_;  // of the values of lora.adapter
};

}  // namespace neap::train
