// torch-free
#include <cmath>

#include "neap/base/error.h"
#include "neap/models/internal/config_parts.h"

namespace neap::models {
namespace {

using neap::internal::concat;

// 0.1 ln(factor) + 1: by how much longer sequences flatten the softmax (YaRN, section 3.4), weighted by `mscale`.
double yarn_mscale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

}  // namespace

double RopeScaling::table_factor() const {
  if (type != Type::kYarn) return 1.0;
  if (attention_factor) return *attention_factor;
  const bool both = mscale != 0 && mscale_all_dim != 0;
  return both ? yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim) : yarn_mscale(factor, 1);
}

double RopeScaling::softmax_factor() const {
  if (type == Type::kDefault || mscale_all_dim == 0) return 1.0;
  const double scale = yarn_mscale(factor, mscale_all_dim);
  return scale * scale;
}

namespace internal {
namespace {

using Type = RopeScaling::Type;

void read_scaling(JsonReader& rope, JsonReader& outside, const ModelConfig& config, RopeScaling& scaling) {
  std::string type = "default";
  rope.read("type", type);  // the name before transformers 4.43
  rope.read("rope_type", type);
  if (type == "default") return;
  if (type == "linear") {
    scaling.type = Type::kLinear;
  } else if (type == "llama3") {
    scaling.type = Type::kLlama3;
  } else if (type == "yarn") {
    scaling.type = Type::kYarn;
  } else {
    return rope.fault("rope_type", concat("'", type, "' is not supported (default, linear, llama3, yarn are)"));
  }
  rope.require("factor", scaling.factor);
  rope.read("mscale_all_dim", scaling.mscale_all_dim);
  if (scaling.type == Type::kLlama3) {
    rope.require("low_freq_factor", scaling.low_freq_factor);
    rope.require("high_freq_factor", scaling.high_freq_factor);
  }
  if (scaling.type == Type::kLlama3 || scaling.type == Type::kYarn) {
    // As transformers has it: the one outside of the object wins.
    scaling.original_max_position_embeddings = config.max_position_embeddings;
    rope.read("original_max_position_embeddings", scaling.original_max_position_embeddings);
    outside.read("original_max_position_embeddings", scaling.original_max_position_embeddings);
  }
  if (scaling.type != Type::kYarn) return;
  rope.read("beta_fast", scaling.beta_fast);
  rope.read("beta_slow", scaling.beta_slow);
  rope.read("truncate", scaling.truncate);
  rope.read("attention_factor", scaling.attention_factor);
  rope.read("mscale", scaling.mscale);
}

}  // namespace

// transformers 5 writes one object "rope_parameters", before it wrote "rope_theta" and "rope_scaling"; of both objects
// it reads the older alone.
void read_rope(JsonReader& reader, ModelConfig& config) {
  reader.read("rope_theta", config.rope_theta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!reader.has(key) || reader.at(key).empty()) continue;
    const auto& object = reader.at(key);
    if (!object.is_object()) return reader.fault(key, "is not an object");
    for (const auto& [name, value] : object.items()) {
      if (value.is_object()) return reader.fault(key, concat("of its own for '", name, "' is not supported"));
    }
    JsonReader rope = reader.inner(key);
    rope.read("rope_theta", config.rope_theta);
    rope.expect("partial_rotary_factor", 1.0);
    return read_scaling(rope, reader, config, config.rope_scaling);
  }
}

void check_rope(const ModelConfig& config, const Expect& expect) {
  const RopeScaling& scaling = config.rope_scaling;
  expect(config.rope_theta > 0, concat("rope_theta must be positive; found ", config.rope_theta));
  expect(scaling.factor >= 1, concat("rope factor must be at least 1; found ", scaling.factor));
  const bool has_original = scaling.original_max_position_embeddings > 0;
  if (scaling.type == Type::kLlama3) {
    expect(scaling.low_freq_factor > 0 && scaling.low_freq_factor < scaling.high_freq_factor,
           concat("low_freq_factor must lie between 0 and high_freq_factor; found ", scaling.low_freq_factor, " and ",
                  scaling.high_freq_factor));
    expect(has_original, "original_max_position_embeddings must be positive");
  }
  if (scaling.type == Type::kYarn) {
    expect(config.rope_theta > 1, concat("yarn needs a rope_theta above 1; found ", config.rope_theta));
    expect(scaling.beta_slow > 0 && scaling.beta_slow <= scaling.beta_fast,
           concat("beta_slow must lie between 0 and beta_fast; found ", scaling.beta_slow, " and ", scaling.beta_fast));
    expect(has_original, "original_max_position_embeddings must be positive");
    expect(scaling.table_factor() > 0, concat("attention_factor must be positive; found ", scaling.table_factor()));
  }
}

void write_rope(const ModelConfig& config, nlohmann::ordered_json& json) {
  const RopeScaling& scaling = config.rope_scaling;
  json["rope_theta"] = config.rope_theta;
  nlohmann::ordered_json& rope = json["rope_scaling"];  // null so far
  if (scaling.type == Type::kDefault) return;
  rope["rope_type"] = scaling.type == Type::kLinear ? "linear" : scaling.type == Type::kLlama3 ? "llama3" : "yarn";
  rope["factor"] = scaling.factor;
  if (scaling.mscale_all_dim != 0) rope["mscale_all_dim"] = scaling.mscale_all_dim;
  if (scaling.type == Type::kLinear) return;
  rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings;
  if (scaling.type == Type::kLlama3) {
    rope["low_freq_factor"] = scaling.low_freq_factor;
    rope["high_freq_factor"] = scaling.high_freq_factor;
    return;
  }
  rope["beta_fast"] = scaling.beta_fast;
  rope["beta_slow"] = scaling.beta_slow;
  if (!scaling.truncate) rope["truncate"] = false;
  if (scaling.attention_factor) rope["attention_factor"] = *scaling.attention_factor;
  if (scaling.mscale != 0) rope["mscale"] = scaling.mscale;
}

}  // namespace internal
}  // namespace neap::models
