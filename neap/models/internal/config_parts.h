// torch-free
// The parts of a config.json that have a file of their own: rotary embedding and the DeepSeek-V3 family.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "neap/models/internal/json_reader.h"
#include "neap/models/model_config.h"

namespace neap::models::internal {

// Adds `what` to the faults unless `ok`.
using Expect = std::function<void(bool ok, const std::string& what)>;

// Beyond these no model is meant, and what follows of them, such as a parameter's elements and bytes, would be no
// number.
inline constexpr int64_t kMostLayers = int64_t{1} << 14;
inline constexpr int64_t kMostParts = int64_t{1} << 16;  // heads, experts; elements of a head
inline constexpr int64_t kWidest = int64_t{1} << 20;     // elements of a token's vector
inline constexpr int64_t kMostTokens = int64_t{1} << 24;
inline constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

struct Size {
  const char* name;
  int64_t value;
  int64_t most;
};
// Each from 1 to its most.
void check_sizes(std::initializer_list<Size> sizes, const Expect& expect);

void read_rope(JsonReader& reader, ModelConfig& config);
void check_rope(const ModelConfig& config, const Expect& expect);
void write_rope(const ModelConfig& config, nlohmann::ordered_json& json);

// Latent attention and experts. `config` has the sizes that all models have.
void read_deepseek(JsonReader& reader, ModelConfig& config);
void check_deepseek(const ModelConfig& config, const Expect& expect);
void write_deepseek(const ModelConfig& config, nlohmann::ordered_json& json);

}  // namespace neap::models::internal
