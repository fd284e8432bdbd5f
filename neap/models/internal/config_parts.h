// torch-free
// The parts of a config.json that have a file of their own: rotary embedding and the DeepSeek-V3 family.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "neap/models/internal/json_reader.h"
#include "neap/models/model_config.h"

namespace neap::models::internal {

// Adds `what` to the faults unless `ok`.
using Expect = std::function<void(bool ok, const std::string& what)>;

void read_rope(JsonReader& reader, ModelConfig& config);
void check_rope(const ModelConfig& config, const Expect& expect);
void write_rope(const ModelConfig& config, nlohmann::ordered_json& json);

// Latent attention and experts. `config` has the sizes that all models have.
void read_deepseek(JsonReader& reader, ModelConfig& config);
void check_deepseek(const ModelConfig& config, const Expect& expect);
void write_deepseek(const ModelConfig& config, nlohmann::ordered_json& json);

}  // namespace neap::models::internal
