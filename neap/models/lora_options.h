// torch-free
// What low-rank adapters look like, and the adapter_config.json of PEFT that says it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace neap::models {

struct LoraOptions {
  int64_t rank = 8;
  double alpha = 16;                                        // the adapter's share is multiplied by scale()
  double dropout = 0;                                       // of the adapter's input, while training
  bool rank_stabilised = false;                             // PEFT's use_rslora
  std::vector<std::string> modules = {"q_proj", "v_proj"};  // see add_lora()

  // alpha / rank; rank_stabilised: alpha / sqrt(rank).
  double scale() const;
};

// UserError naming the value.
void check(const LoraOptions& options);

// PEFT's adapter_config.json. What it may ask for beyond these options (DoRA, trained biases, ranks of single modules,
// modules trained whole, …) is a UserError that names the key: ignoring it would compute something else. Its
// target_modules may be an expression; the adapter's tensors name the modules, so `modules` is left empty.
LoraOptions read_adapter_config(const std::filesystem::path& file);
std::string adapter_config_json(const LoraOptions& options, const std::string& base_model);

}  // namespace neap::models
