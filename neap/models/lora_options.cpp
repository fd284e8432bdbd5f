// torch-free
#include "neap/models/lora_options.h"

#include <cmath>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>

#include "neap/base/error.h"
#include "neap/base/json_text.h"

namespace neap::models {
namespace {

using OrderedJson = nlohmann::ordered_json;
using neap::internal::concat;

constexpr int64_t kMostRank = 65536;

bool is_nothing(const OrderedJson& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) || (value.is_structured() && value.empty()) ||
         (value.is_number() && value.get<double>() == 0);
}

// Other ways of initialising an adapter take its share out of the model's own weights (PiSSA, OLoRA, CorDA, LoftQ), or
// are another way of computing. PEFT does the same again when it loads such an adapter.
bool keeps_the_weights(const OrderedJson& init) {
  return init.is_null() || init.is_boolean() || init == "gaussian" || init == "eva" || init == "orthogonal";
}

// One adapter_config.json.
class Reader {
 public:
  Reader(OrderedJson json, const std::filesystem::path& file) : json_(std::move(json)), file_(file.string()) {}

  LoraOptions read() const {
    check_that(json_.is_object(), "expected a JSON object");
    check_that(json_.value("peft_type", OrderedJson()) == "LORA", "expected \"peft_type\": \"LORA\"", "peft_type");
    check_that(json_.value("bias", OrderedJson("none")) == "none",
               "expected \"bias\": \"none\": biases are not trained", "bias");
    for (const char* key : {"use_dora", "use_qalora", "use_bdlora", "modules_to_save", "rank_pattern", "alpha_pattern",
                            "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters",
                            "trainable_token_indices", "megatron_config", "alora_invocation_tokens", "arrow_config",
                            "lora_ga_config", "monteclora_config", "velora_config", "kasa_config", "tinylora_config"}) {
      check_that(!json_.contains(key) || is_nothing(json_[key]), concat("expected no ", key, ": it is not supported"),
                 key);
    }
    check_that(
        keeps_the_weights(json_.value("init_lora_weights", OrderedJson())),
        "expected adapters beside weights that stay as they are: init_lora_weights true, false, gaussian, eva or "
        "orthogonal (PEFT converts others: path_initial_model_for_weight_conversion)",
        "init_lora_weights");
    LoraOptions options;
    options.rank = rank();
    options.alpha = number("lora_alpha", 8);
    options.dropout = number("lora_dropout", 0);
    options.rank_stabilised = json_.contains("use_rslora") && !is_nothing(json_["use_rslora"]);
    options.modules.clear();
    try {
      check(options);
    } catch (const UserError& error) {
      NEAP_USER_ERROR("[lora.adapter] ", file_, ": ", error.what());
    }
    return options;
  }

 private:
  double number(const char* key, double otherwise) const {
    if (!json_.contains(key)) return otherwise;
    check_that(json_[key].is_number(), concat("expected a number in ", key), key);
    return json_[key].get<double>();
  }

  int64_t rank() const {
    const double r = number("r", 8);
    check_that(r >= 1 && r <= kMostRank && r == std::floor(r), concat("expected a rank from 1 to ", kMostRank, " in r"),
               "r");
    return static_cast<int64_t>(r);
  }

  void check_that(bool good, const std::string& expected, const char* key = nullptr) const {
    NEAP_CHECK(good, "[lora.adapter] ", file_, ": ", expected, "; found ",
               key == nullptr
                   ? "something else"
                   : json_.value(key, OrderedJson()).dump(-1, ' ', false, OrderedJson::error_handler_t::replace));
  }

  OrderedJson json_;
  std::string file_;
};

}  // namespace

double LoraOptions::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (rank_stabilised ? std::sqrt(r) : r);
}

void check(const LoraOptions& options) {
  NEAP_CHECK(options.rank >= 1 && options.rank <= kMostRank, "[lora.rank] expected a rank from 1 to ", kMostRank,
             "; found ", options.rank);
  NEAP_CHECK(std::isfinite(options.alpha), "[lora.alpha] expected a finite number; found ", options.alpha);
  NEAP_CHECK(options.dropout >= 0 && options.dropout < 1,
             "[lora.dropout] expected a probability from 0, below 1; found ", options.dropout);
}

LoraOptions read_adapter_config(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  NEAP_CHECK(in.good(), "[lora.adapter] expected a PEFT adapter directory with adapter_config.json; cannot be opened: ",
             file.string());
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  auto json = parse_json<OrderedJson>(text);
  NEAP_CHECK(!json.is_discarded(), "[lora.adapter] ", file.string(), ": not valid JSON");
  return Reader(std::move(json), file).read();
}

std::string adapter_config_json(const LoraOptions& options, const std::string& base_model) {
  const OrderedJson json = {{"peft_type", "LORA"},
                            {"task_type", "CAUSAL_LM"},
                            {"base_model_name_or_path", base_model},
                            {"r", options.rank},
                            {"lora_alpha", options.alpha},
                            {"lora_dropout", options.dropout},
                            {"use_rslora", options.rank_stabilised},
                            {"target_modules", options.modules},
                            {"bias", "none"},
                            {"fan_in_fan_out", false},
                            {"inference_mode", true}};
  return json.dump(2) + "\n";
}

}  // namespace neap::models
