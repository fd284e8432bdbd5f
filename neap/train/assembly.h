// What a run is made of: the input, which is looked at whole before anything large is allocated, and what lies on the
// device from the first step to the last. run.h composes steps, checkpoints and files around them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "neap/comm/world.h"
#include "neap/device/device.h"
#include "neap/models/causal_lm.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/adapters.h"
#include "neap/train/checkpoints.h"
#include "neap/train/config.h"
#include "neap/train/expert_balance.h"
#include "neap/train/memory_report.h"
#include "neap/train/optimizer.h"
#include "neap/train/parallel.h"
#include "neap/train/run.h"
#include "neap/train/sequences.h"
#include "neap/train/token_file.h"
#include "neap/train/trainer.h"

namespace neap::train {

// Of one rank alone, null and 1; the only one writes.
inline comm::World* world_of(const Shell& shell) { return shell.ranks == nullptr ? nullptr : &shell.ranks->world; }
inline int64_t ranks_of(const Shell& shell) { return shell.ranks == nullptr ? 1 : shell.ranks->mesh.world(); }
inline bool writes(const Shell& shell) { return shell.ranks == nullptr || shell.ranks->world.rank() == 0; }

// Modules and layers of a section that chooses units.
template <class Section>
std::vector<std::string> patterns_of(const Section& section) {
  std::vector<std::string> patterns = section.modules;
  patterns.insert(patterns.end(), section.layers.begin(), section.layers.end());
  return patterns;
}

// UserError for whatever does not fit: the data and its tokens, units that do not exist, weights.
struct Input {
  models::ModelConfig model;  // as model.mtp has it
  TokenFile tokens;
  std::optional<int64_t> end_token;  // of documents that do not see each other, or whose ends do not count
  Sequences sequences;
  std::optional<TokenFile> eval_tokens;
  std::optional<Sequences> eval_sequences;

  std::map<std::string, std::string> adapters = {};  // Adapters::description(); empty without

  explicit Input(const RunConfig& config);
  // What of it a checkpoint has beside the model and the data.
  checkpoint::State description() const;
};

// Collective with several ranks: it builds the model. `config` and what `shell` refers to live longer.
class Assembly {
 public:
  Assembly(const RunConfig& config, const Input& input, const Shell& shell);

  device::Device& device() { return device_; }
  Optimizer& optimizer() { return *optimizer_; }
  offload::Engine* engine() { return engine_ ? &*engine_ : nullptr; }
  recompute::Recompute* recompute() { return recompute_ ? &*recompute_ : nullptr; }
  ExpertBalance* experts() { return balance_ ? &*balance_ : nullptr; }
  shard::Sharded* sharded() { return sharded_ ? &*sharded_ : nullptr; }
  const Adapters* adapters() const { return adapters_ ? &*adapters_ : nullptr; }
  std::vector<at::Tensor> frozen_parameters() const;
  // Null unless the model is in pieces; one rank alone may hold it so for its dtypes.
  comm::World* world() { return ranks_ != nullptr ? &ranks_->world : nullptr; }
  ModelState state() {
    return {.model = *model_, .sharded = sharded(), .optimizer = *optimizer_, .device = device_.c10_device()};
  }
  int64_t parameter_count();  // of the whole model
  // To train with, and to evaluate with: the model's own, without z_loss.
  Trainer::Loss loss();
  Trainer::Loss evaluation_loss();

  // Running out of the device's memory in `function` becomes the report of what holds it.
  template <class Function>
  void guarded(const std::string& when, Function&& function) {
    device_.reset_peak();
    try {
      function();
    } catch (const std::exception& error) {
      const auto reason = out_of_memory_text(error);
      if (!reason) throw;
      throw DeviceOutOfMemory({.when = when, .reason = *reason, .use = use_of_memory()});
    }
  }

 private:
  void be_one_rank();
  void load_model(const Input& input);
  void freeze_further_layers();
  void make_optimizer();
  MemoryUse use_of_memory() const;

  const RunConfig& config_;
  device::Device& device_;
  std::unique_ptr<comm::World> alone_;
  std::optional<Ranks> rank_of_one_;
  const Ranks* ranks_;  // null: nothing is sharded
  std::shared_ptr<models::CausalLM> model_;
  std::optional<Adapters> adapters_;
  std::optional<shard::Sharded> sharded_;
  std::optional<offload::Engine> engine_;
  std::optional<recompute::Recompute> recompute_;
  std::optional<ExpertBalance> balance_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace neap::train
