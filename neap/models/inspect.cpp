#include "neap/models/inspect.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "neap/base/error.h"
#include "neap/models/causal_lm.h"
#include "neap/models/hugging_face.h"

namespace neap::models {
namespace {

using neap::internal::concat;

constexpr std::string_view kKinds[] = {"embedding", "attention", "mlp", "router", "experts", "norms", "head", "mtp"};

std::string_view kind_of(std::string_view name, const ModelConfig& config) {
  if (is_of_mtp_layer(name, config)) return "mtp";
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (has("embed_tokens")) return "embedding";
  if (has("lm_head")) return "head";
  if (has("norm.")) return "norms";
  if (has(".self_attn.")) return "attention";
  if (has(".mlp.experts.")) return "experts";
  return has(".mlp.gate.") ? "router" : "mlp";
}

template <class... Arguments>
std::string formatted(const char* format, Arguments... arguments) {
  char line[160];
  std::snprintf(line, sizeof line, format, arguments...);
  return line;
}

std::string millions(int64_t count) { return formatted("%.1f M", static_cast<double>(count) * 1e-6); }

std::string layers_line(const ModelConfig& config) {
  if (!config.experts) return std::to_string(config.num_hidden_layers);
  const ExpertsConfig& experts = *config.experts;
  const int64_t dense = std::min(experts.first_layer, config.num_hidden_layers);
  return concat(
      config.num_hidden_layers, ": ", dense, " with an mlp, ", config.num_hidden_layers - dense, " with ",
      experts.count, " experts, ", experts.per_token, " for a token",
      config.with_mtp ? concat("; ", config.mtp_layers, " behind them that predict further tokens (model.mtp)") : "");
}

std::string attention_line(const ModelConfig& config) {
  if (!config.latent_attention) {
    return concat(config.num_attention_heads, " heads of ", config.head_dim, " for queries, ",
                  config.num_key_value_heads, " for keys and values");
  }
  const LatentAttentionConfig& latent = *config.latent_attention;
  return concat(config.num_attention_heads, " heads of ", latent.qk_nope_head_dim, " + ", latent.qk_rope_head_dim,
                " for queries and keys, ", latent.v_head_dim, " for values; latents of ",
                latent.q_lora_rank ? concat(*latent.q_lora_rank, " and ") : "", latent.kv_lora_rank);
}

std::string row(const KindOfTensors& kind, const KindOfTensors& total) {
  const double share = total.bytes.count > 0
                           ? 100.0 * static_cast<double>(kind.bytes.count) / static_cast<double>(total.bytes.count)
                           : 0.0;
  return formatted("%-10s %8lld %14lld %12s %6.1f %%\n", std::string(kind.name).c_str(),
                   static_cast<long long>(kind.tensors), static_cast<long long>(kind.parameters),
                   to_string(kind.bytes).c_str(), share);
}

}  // namespace

KindOfTensors Inspection::total() const {
  KindOfTensors sum{.name = "total", .bytes = {}};
  for (const KindOfTensors& kind : kinds) {
    sum.tensors += kind.tensors;
    sum.parameters += kind.parameters;
    sum.bytes += kind.bytes;
  }
  return sum;
}

int64_t Inspection::parameters_per_token() const {
  int64_t count = total().parameters;
  for (const KindOfTensors& kind : kinds) {
    if (kind.name == "mtp") count -= kind.parameters;
    if (kind.name == "experts")
      count -= kind.parameters / config.experts->count * (config.experts->count - config.experts->per_token);
  }
  return count;
}

Inspection inspect_hf(const std::filesystem::path& dir) {
  std::error_code error;
  NEAP_CHECK(std::filesystem::is_directory(dir, error),
             "[models] expected a model directory; not found: ", dir.string());
  Inspection found{.config = ModelConfig::from_file(dir / "config.json"), .dtypes = {}, .kinds = {}};
  found.config.with_mtp = hf_has_mtp_layers(found.config, dir);
  const CausalLM model(found.config, at::TensorOptions(at::kMeta));
  for (const std::string_view name : kKinds) found.kinds.push_back({.name = name, .bytes = {}});
  std::set<std::filesystem::path> paths;
  for (const StoredTensor& stored : hf_contents(model, dir)) {
    paths.insert(stored.file);
    ++found.dtypes[std::string(files::name_of(stored.info.type))];
    KindOfTensors& kind =
        *std::ranges::find(found.kinds, kind_of(stored.info.name, found.config), &KindOfTensors::name);
    ++kind.tensors;
    kind.parameters += stored.info.bytes / files::size_of(stored.info.type);
    kind.bytes += Bytes(stored.info.bytes);
  }
  found.files = static_cast<int64_t>(paths.size());
  std::erase_if(found.kinds, [](const KindOfTensors& kind) { return kind.tensors == 0; });
  return found;
}

std::string to_text(const Inspection& inspection) {
  const ModelConfig& config = inspection.config;
  const KindOfTensors total = inspection.total();
  std::string dtypes;
  for (const auto& [name, count] : inspection.dtypes)
    dtypes += concat(dtypes.empty() ? "" : ", ", count, " tensors of ", name);
  std::string text =
      concat("model       ", config.architecture(), ", hidden size ", config.hidden_size, ", vocabulary ",
             config.vocab_size, config.tie_word_embeddings ? " (head tied to the embedding)" : "", ", up to ",
             config.max_position_embeddings, " tokens\nlayers      ", layers_line(config), "\nattention   ",
             attention_line(config), "\nfiles       ", inspection.files, inspection.files == 1 ? " file, " : " files, ",
             dtypes, "\nparameters  ", millions(total.parameters));
  if (inspection.parameters_per_token() < total.parameters)
    text += concat(", of which a token meets ", millions(inspection.parameters_per_token()));
  text += "\n\nkind        tensors     parameters        bytes    share\n";
  for (const KindOfTensors& kind : inspection.kinds) text += row(kind, total);
  return text + row(total, total);
}

}  // namespace neap::models
