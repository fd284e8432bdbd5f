#include "neap/models/model_config.h"

#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/json_text.h"
#include "neap/models/internal/config_parts.h"

namespace neap::models {
namespace {

using internal::JsonReader;
using neap::internal::concat;

using Json = nlohmann::json;

struct Family {
  std::string_view model_type;
  std::string_view architecture;
  int64_t positions;  // what transformers assumes where config.json has no max_position_embeddings
};
constexpr std::array kFamilies = {
    Family{"llama", "LlamaForCausalLM", 2048}, Family{"mistral", "MistralForCausalLM", 131072},
    Family{"qwen2", "Qwen2ForCausalLM", 32768}, Family{"qwen3", "Qwen3ForCausalLM", 32768},
    Family{"deepseek_v3", "DeepseekV3ForCausalLM", 4096}};
constexpr std::string_view kDeepseek = "deepseek_v3";

const Family* find_family(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
  }
  return nullptr;
}

void read_biases(JsonReader& reader, ModelConfig& config) {
  if (config.model_type == "qwen2") {
    config.qkv_bias = true;
  } else if (config.model_type == "llama" || config.model_type == "qwen3") {
    config.qkv_bias = config.output_bias = reader.get("attention_bias", false);
  }
  if (config.model_type == "llama") reader.read("mlp_bias", config.mlp_bias);
  config.qk_norm = config.model_type == "qwen3";
}

void read_window(const Json& json, JsonReader& reader, ModelConfig& config) {
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
void refuse_unsupported(JsonReader& reader) {
  reader.expect<std::string>("hidden_act", "silu");
  reader.expect("attention_dropout", 0.0);
  reader.expect("partial_rotary_factor", 1.0);
  if (reader.has("quantization_config"))
    reader.fault("quantization_config", "is not supported: quantised weights cannot be trained");
}

void read_sizes(JsonReader& reader, ModelConfig& config) {
  reader.require("vocab_size", config.vocab_size);
  reader.require("hidden_size", config.hidden_size);
  reader.require("intermediate_size", config.intermediate_size);
  reader.require("num_hidden_layers", config.num_hidden_layers);
  reader.require("num_attention_heads", config.num_attention_heads);
  config.num_key_value_heads = config.num_attention_heads;
  if (config.model_type == "llama" || config.model_type == kDeepseek) {
    reader.read("num_key_value_heads", config.num_key_value_heads);
  } else {
    reader.require("num_key_value_heads", config.num_key_value_heads);
  }
  if (config.model_type == "qwen3") config.head_dim = 128;  // transformers' default; the others divide
  if (config.model_type != "qwen3" && config.num_attention_heads > 0) {
    config.head_dim = config.hidden_size / config.num_attention_heads;
  }
  reader.read("head_dim", config.head_dim);
  config.max_position_embeddings = find_family(config.model_type)->positions;
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
  auto json = parse_json<Json>(text);
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

void internal::check_sizes(std::initializer_list<Size> sizes, const Expect& expect) {
  for (const auto& [name, value, most] : sizes) {
    expect(value > 0, concat(name, " must be positive; found ", value));
    expect(value <= most, concat(name, " must be at most ", most, "; found ", value));
  }
}

ModelConfig ModelConfig::from_json(std::string_view text, std::string_view source) {
  const Json json = parse_object(text, source);
  check_family(json, source);
  std::vector<std::string> faults;
  JsonReader reader(json, faults);
  ModelConfig config;
  reader.read("model_type", config.model_type);
  read_sizes(reader, config);
  internal::read_rope(reader, config);
  if (config.model_type == kDeepseek) {
    internal::read_deepseek(reader, config);
  } else {
    read_biases(reader, config);
  }
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

ModelConfig ModelConfig::from_file(const std::filesystem::path& config_json) {
  std::ifstream file(config_json, std::ios::binary);
  NEAP_CHECK(file.good(), "[models] expected a readable file ", config_json.string(),
             "; not found; give a Hugging Face model directory");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return from_json(text, config_json.string());
}

void ModelConfig::validate(std::string_view source) const {
  std::vector<std::string> faults;
  const auto expect = [&](bool ok, auto... what) {
    if (!ok) faults.push_back(concat(what...));
  };
  internal::check_sizes({{"vocab_size", vocab_size, internal::kMostTokens},
                         {"hidden_size", hidden_size, internal::kWidest},
                         {"intermediate_size", intermediate_size, internal::kWidest},
                         {"num_hidden_layers", num_hidden_layers, internal::kMostLayers},
                         {"num_attention_heads", num_attention_heads, internal::kMostParts},
                         {"num_key_value_heads", num_key_value_heads, internal::kMostParts},
                         {"head_dim", head_dim, internal::kMostParts},
                         {"max_position_embeddings", max_position_embeddings, internal::kAny},
                         {"sliding_window", sliding_window.value_or(1), internal::kAny}},
                        expect);
  expect(find_family(model_type) != nullptr, "model_type '", model_type, "' is not supported");
  const bool deepseek = model_type == kDeepseek;
  expect(latent_attention.has_value() == deepseek && experts.has_value() == deepseek,
         "latent attention and experts belong to model_type 'deepseek_v3', and to no other; found '", model_type, "'");
  expect(head_dim % 2 == 0, "head_dim must be even; found ", head_dim);
  expect(num_key_value_heads <= 0 || num_attention_heads % num_key_value_heads == 0, "num_attention_heads (",
         num_attention_heads, ") must be a multiple of num_key_value_heads (", num_key_value_heads, ")");
  expect(rms_norm_eps > 0, "rms_norm_eps must be positive; found ", rms_norm_eps);
  expect(initializer_range > 0, "initializer_range must be positive; found ", initializer_range);
  internal::check_rope(*this, expect);
  internal::check_deepseek(*this, expect);
  throw_if_any(faults, source);
}

std::string ModelConfig::architecture() const {
  const Family* family = find_family(model_type);
  NEAP_ASSERT(family != nullptr, model_type);
  return std::string(family->architecture);
}

std::string ModelConfig::to_json(std::string_view dtype) const {
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
      {"initializer_range", initializer_range},
      {"tie_word_embeddings", tie_word_embeddings},
      {"torch_dtype", dtype},
  };
  internal::write_rope(*this, json);
  internal::write_deepseek(*this, json);
  if (model_type == "llama" || model_type == "qwen3" || latent_attention) json["attention_bias"] = qkv_bias;
  if (model_type == "llama") json["mlp_bias"] = mlp_bias;
  if (model_type == "mistral")
    json["sliding_window"] = sliding_window ? nlohmann::ordered_json(*sliding_window) : nullptr;
  if (model_type == "qwen2" || model_type == "qwen3") json["use_sliding_window"] = false;
  if (bos_token_id) json["bos_token_id"] = *bos_token_id;
  if (eos_token_id) json["eos_token_id"] = *eos_token_id;
  return json.dump(2) + "\n";
}

}  // namespace neap::models
