// What a run leaves for others: the trained model as a Hugging Face directory, tokenizer and all, so that
// AutoModelForCausalLM.from_pretrained() and AutoTokenizer.from_pretrained() take it as it is.
//
// A directory appears whole, under its name, or not at all.
#pragma once

#include <filesystem>
#include <string>

#include "neap/models/model_config.h"

namespace torch::nn {
class Module;
}
namespace neap::checkpoint {
class Reader;
}
namespace neap::comm {
class World;
}
namespace neap::shard {
class Sharded;
}

namespace neap::train {

struct ModelDirectory {
  std::filesystem::path path;
  models::ModelConfig config;
  std::filesystem::path source;  // of the tokenizer's files, those that there are
};

// Of the model as it is; `sharded`: in pieces, or null. Replaces a directory of that path. Collective; rank 0 writes,
// and holds the whole model on the host when it is in pieces. An error is one on every rank.
void write_model(const ModelDirectory& target, const torch::nn::Module& model, shard::Sharded* sharded,
                 comm::World* world);

// A line each: when the model was built without layers that predict further tokens (model.mtp: off), `path` has none;
// with adapters it is the model that they stand beside.
void warn_of_export(const std::filesystem::path& path, const models::ModelConfig& config, bool adapters);

// Of a checkpoint that Checkpoints made, tensor by tensor. UserError when `out` is there already and not empty.
void convert_checkpoint(checkpoint::Reader& reader, const std::filesystem::path& out);

}  // namespace neap::train
