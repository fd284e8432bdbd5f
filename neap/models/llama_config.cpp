#include "neap/models/llama_config.h"

#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "neap/base/error.h"

namespace neap::models {
namespace {

using neap::internal::concat;

using Json = nlohmann::json;

struct Family {
  std::string_view model_type;
  std::string_view architecture;
};
constexpr std::array kFamilies = {Family{"llama", "LlamaForCausalLM"}, Family{"mistral", "MistralForCausalLM"},
                                  Family{"qwen2", "Qwen2ForCausalLM"}, Family{"qwen3", "Qwen3ForCausalLM"}};

const Family* find_family(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
  }
  return nullptr;
}

// Reads fields of one JSON object and gathers everything that is wrong with it.
class Reader {
 public:
  Reader(const Json& object, std::vector<std::string>& faults, std::string prefix = "")
      : object_(object), faults_(faults), prefix_(std::move(prefix)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  template <class T>
  void read(const char* key, T& value) {
    if (!has(key)) return;
    const Json& found = object_.at(key);
    if (fits<T>(found)) {
      value = found.get<T>();
    } else {
      fault(key, concat("has the wrong type: ", found.dump()));
    }
  }
  template <class T>
  void require(const char* key, T& value) {
    if (!has(key)) return fault(key, "is missing");
    read(key, value);
  }
  template <class T>
  T get(const char* key, T fallback) {
    read(key, fallback);
    return fallback;
  }
  void fault(std::string_view key, std::string_view what) { faults_.push_back(concat(prefix_, key, " ", what)); }

 private:
  template <class T>
  static bool fits(const Json& found) {
    if constexpr (std::is_same_v<T, bool>) return found.is_boolean();
    if constexpr (std::is_same_v<T, std::string>) return found.is_string();
    if constexpr (std::is_same_v<T, double>) return found.is_number();
    if constexpr (std::is_same_v<T, int64_t>) return found.is_number_integer();
    return false;
  }

  const Json& object_;
  std::vector<std::string>& faults_;
  std::string prefix_;
};

void read_scaling(Reader& rope, RopeScaling& scaling) {
  std::string type = "default";
  rope.read("type", type);  // the name before transformers 4.43
  rope.read("rope_type", type);
  if (type == "default") return;
  if (type != "linear" && type != "llama3") {
    return rope.fault("rope_type", concat("'", type, "' is not supported (default, linear, llama3 are)"));
  }
  scaling.type = type == "linear" ? RopeScaling::Type::kLinear : RopeScaling::Type::kLlama3;
  rope.require("factor", scaling.factor);
  if (scaling.type == RopeScaling::Type::kLlama3) {
    rope.require("low_freq_factor", scaling.low_freq_factor);
    rope.require("high_freq_factor", scaling.high_freq_factor);
    rope.require("original_max_position_embeddings", scaling.original_max_position_embeddings);
  }
}

// transformers 5 writes one object "rope_parameters", before it wrote "rope_theta" and "rope_scaling".
void read_rope(const Json& json, Reader& reader, std::vector<std::string>& faults, LlamaConfig& config) {
  reader.read("rope_theta", config.rope_theta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!reader.has(key)) continue;
    if (!json.at(key).is_object()) {
      reader.fault(key, "is not an object");
      continue;
    }
    Reader rope(json.at(key), faults, concat(key, "."));
    rope.read("rope_theta", config.rope_theta);
    if (rope.get("partial_rotary_factor", 1.0) != 1.0)
      rope.fault("partial_rotary_factor", "other than 1 is not supported");
    read_scaling(rope, config.rope_scaling);
  }
}

void read_biases(Reader& reader, LlamaConfig& config) {
  if (config.model_type == "qwen2") {
    config.qkv_bias = true;
  } else if (config.model_type == "llama" || config.model_type == "qwen3") {
    config.qkv_bias = config.output_bias = reader.get("attention_bias", false);
  }
  if (config.model_type == "llama") reader.read("mlp_bias", config.mlp_bias);
  config.qk_norm = config.model_type == "qwen3";
}

void read_window(const Json& json, Reader& reader, LlamaConfig& config) {
  if (config.model_type == "mistral") {
    if (!json.contains("sliding_window")) {
      config.sliding_window = 4096;  // what transformers assumes
    } else if (reader.has("sliding_window")) {
      config.sliding_window = reader.get<int64_t>("sliding_window", 0);
    }
  } else if (reader.get("use_sliding_window", false) && reader.has("sliding_window") &&
             reader.get<int64_t>("max_window_layers", 0) < config.num_hidden_layers) {
    reader.fault("use_sliding_window", "is not supported");
  }
  if (reader.has("layer_types")) {
    for (const Json& type : json.at("layer_types")) {
      if (type != "full_attention")
        return reader.fault("layer_types", concat("holds ", type.dump(), ", which is not supported"));
    }
  }
}

// Fields that change the numbers, at a value that this layer does not compute.
void refuse_unsupported(Reader& reader) {
  if (const auto act = reader.get<std::string>("hidden_act", "silu"); act != "silu") {
    reader.fault("hidden_act", concat("'", act, "' is not supported (silu is)"));
  }
  if (reader.get("attention_dropout", 0.0) != 0.0) reader.fault("attention_dropout", "other than 0 is not supported");
  if (reader.get("partial_rotary_factor", 1.0) != 1.0)
    reader.fault("partial_rotary_factor", "other than 1 is not supported");
  if (reader.has("quantization_config"))
    reader.fault("quantization_config", "is not supported: quantised weights cannot be trained");
}

void read_sizes(Reader& reader, LlamaConfig& config) {
  reader.require("vocab_size", config.vocab_size);
  reader.require("hidden_size", config.hidden_size);
  reader.require("intermediate_size", config.intermediate_size);
  reader.require("num_hidden_layers", config.num_hidden_layers);
  reader.require("num_attention_heads", config.num_attention_heads);
  config.num_key_value_heads = config.num_attention_heads;
  if (config.model_type == "llama") {
    reader.read("num_key_value_heads", config.num_key_value_heads);
  } else {
    reader.require("num_key_value_heads", config.num_key_value_heads);
  }
  if (config.model_type == "qwen3") config.head_dim = 128;  // transformers' default; the others divide
  if (config.model_type != "qwen3" && config.num_attention_heads > 0) {
    config.head_dim = config.hidden_size / config.num_attention_heads;
  }
  reader.read("head_dim", config.head_dim);
  reader.read("max_position_embeddings", config.max_position_embeddings);
}

void read_token_id(const Json& json, const char* key, std::optional<int64_t>& id) {
  const auto found = json.find(key);  // a list of end tokens is legal; the first one is the tokenizer's
  if (found == json.end()) return;
  const Json& value = found->is_array() && !found->empty() ? found->front() : *found;
  if (value.is_number_integer()) id = value.get<int64_t>();
}

void throw_if_any(const std::vector<std::string>& faults, std::string_view source) {
  if (faults.empty()) return;
  std::ostringstream list;
  for (const std::string& fault : faults) list << "\n  " << fault;
  NEAP_USER_ERROR("[models] ", source, ": this model cannot be built:", list.str());
}

Json parse_object(std::string_view text, std::string_view source) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  NEAP_CHECK(!json.is_discarded(), "[models] ", source, ": not JSON; is the file truncated?");
  NEAP_CHECK(json.is_object(), "[models] ", source, ": expected a JSON object; found ", json.type_name());
  return json;
}

std::string known_families() {
  std::string names;
  for (const Family& family : kFamilies) {
    names += concat(names.empty() ? "" : ", ", family.model_type, " (", family.architecture, ")");
  }
  return names;
}

void check_family(const Json& json, std::string_view source) {
  const std::string type = json.value("model_type", Json("")).is_string() ? json.value("model_type", "") : "";
  const Family* family = find_family(type);
  NEAP_CHECK(family != nullptr, "[models] ", source, ": model_type '", type,
             "' is not supported; these are: ", known_families());
  const auto found = json.find("architectures");
  if (found == json.end() || !found->is_array() || found->empty()) return;
  NEAP_CHECK(found->front() == family->architecture, "[models] ", source, ": architecture ", found->front().dump(),
             " of model_type '", type, "' is not supported; ", family->architecture, " is");
}

}  // namespace

LlamaConfig LlamaConfig::from_json(std::string_view text, std::string_view source) {
  const Json json = parse_object(text, source);
  check_family(json, source);
  std::vector<std::string> faults;
  Reader reader(json, faults);
  LlamaConfig config;
  reader.read("model_type", config.model_type);
  read_sizes(reader, config);
  read_rope(json, reader, faults, config);
  read_biases(reader, config);
  read_window(json, reader, config);
  refuse_unsupported(reader);
  reader.read("rms_norm_eps", config.rms_norm_eps);
  reader.read("initializer_range", config.initializer_range);
  reader.read("tie_word_embeddings", config.tie_word_embeddings);
  read_token_id(json, "bos_token_id", config.bos_token_id);
  read_token_id(json, "eos_token_id", config.eos_token_id);
  throw_if_any(faults, source);
  config.validate(source);
  return config;
}

LlamaConfig LlamaConfig::from_file(const std::filesystem::path& config_json) {
  std::ifstream file(config_json, std::ios::binary);
  NEAP_CHECK(file.good(), "[models] expected a readable file ", config_json.string(),
             "; not found; give a Hugging Face model directory");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return from_json(text, config_json.string());
}

void LlamaConfig::validate(std::string_view source) const {
  std::vector<std::string> faults;
  const auto expect = [&](bool ok, auto... what) {
    if (!ok) faults.push_back(concat(what...));
  };
  const std::pair<const char*, int64_t> positive[] = {
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"intermediate_size", intermediate_size},
      {"num_hidden_layers", num_hidden_layers},
      {"num_attention_heads", num_attention_heads},
      {"num_key_value_heads", num_key_value_heads},
      {"head_dim", head_dim},
      {"max_position_embeddings", max_position_embeddings},
      {"sliding_window", sliding_window.value_or(1)},
  };
  for (const auto& [name, value] : positive) expect(value > 0, name, " must be positive; found ", value);
  expect(find_family(model_type) != nullptr, "model_type '", model_type, "' is not supported");
  expect(head_dim % 2 == 0, "head_dim must be even; found ", head_dim);
  expect(num_key_value_heads <= 0 || num_attention_heads % num_key_value_heads == 0, "num_attention_heads (",
         num_attention_heads, ") must be a multiple of num_key_value_heads (", num_key_value_heads, ")");
  expect(rms_norm_eps > 0, "rms_norm_eps must be positive; found ", rms_norm_eps);
  expect(rope_theta > 0, "rope_theta must be positive; found ", rope_theta);
  expect(initializer_range > 0, "initializer_range must be positive; found ", initializer_range);
  expect(rope_scaling.factor >= 1, "rope factor must be at least 1; found ", rope_scaling.factor);
  if (rope_scaling.type == RopeScaling::Type::kLlama3) {
    expect(rope_scaling.low_freq_factor > 0 && rope_scaling.low_freq_factor < rope_scaling.high_freq_factor,
           "low_freq_factor must lie between 0 and high_freq_factor; found ", rope_scaling.low_freq_factor, " and ",
           rope_scaling.high_freq_factor);
    expect(rope_scaling.original_max_position_embeddings > 0, "original_max_position_embeddings must be positive");
  }
  throw_if_any(faults, source);
}

std::string LlamaConfig::architecture() const {
  const Family* family = find_family(model_type);
  NEAP_ASSERT(family != nullptr, model_type);
  return std::string(family->architecture);
}

std::string LlamaConfig::to_json(std::string_view dtype) const {
  nlohmann::ordered_json json = {
      {"architectures", {architecture()}},
      {"model_type", model_type},
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"intermediate_size", intermediate_size},
      {"num_hidden_layers", num_hidden_layers},
      {"num_attention_heads", num_attention_heads},
      {"num_key_value_heads", num_key_value_heads},
      {"head_dim", head_dim},
      {"hidden_act", "silu"},
      {"max_position_embeddings", max_position_embeddings},
      {"rms_norm_eps", rms_norm_eps},
      {"rope_theta", rope_theta},
      {"rope_scaling", nullptr},
      {"initializer_range", initializer_range},
      {"tie_word_embeddings", tie_word_embeddings},
      {"torch_dtype", dtype},
  };
  if (rope_scaling.type == RopeScaling::Type::kLinear) {
    json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", rope_scaling.factor}};
  } else if (rope_scaling.type == RopeScaling::Type::kLlama3) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", rope_scaling.factor},
                            {"low_freq_factor", rope_scaling.low_freq_factor},
                            {"high_freq_factor", rope_scaling.high_freq_factor},
                            {"original_max_position_embeddings", rope_scaling.original_max_position_embeddings}};
  }
  if (model_type == "llama" || model_type == "qwen3") json["attention_bias"] = qkv_bias;
  if (model_type == "llama") json["mlp_bias"] = mlp_bias;
  if (model_type == "mistral")
    json["sliding_window"] = sliding_window ? nlohmann::ordered_json(*sliding_window) : nullptr;
  if (model_type == "qwen2" || model_type == "qwen3") json["use_sliding_window"] = false;
  if (bos_token_id) json["bos_token_id"] = *bos_token_id;
  if (eos_token_id) json["eos_token_id"] = *eos_token_id;
  return json.dump(2) + "\n";
}

}  // namespace neap::models
