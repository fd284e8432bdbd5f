// torch-free
// MindFormers' swap, recompute, recompute_config and parallelism, as its documentation of the training configuration
// describes them (mindspore.cn/mindformers/docs, r2.0.0: feature/configuration and feature/memory_optimization;
// recompute_config: r1.9.0).
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/train/foreign_blocks.h"

namespace neap::train::internal {
namespace {

using neap::internal::concat;
using Kind = BlockNode::Kind;

constexpr int64_t kMost = 1'000'000;

// The operation of a layer under the name that Hugging Face's modules have.
std::string module_of(const std::string& path, const BlockNode& node, const std::string& op) {
  const bool plain = !op.empty() && op.find_first_not_of(
                                        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                        "0123456789_.") == std::string::npos;
  if (!plain) throw_bad_block_value(path, node, "the path of a module within a layer, such as attention or mlp");
  const size_t dot = op.find('.');
  const std::string head = op.substr(0, dot);
  const std::string rest = dot == std::string::npos ? "" : op.substr(dot);
  return (head == "attention" || head == "self_attention" ? "self_attn" : head) + rest;
}

std::string pattern(int64_t layer, const std::string& module) { return concat("model.layers.", layer, ".", module); }

void demand_layers(const std::string& key, const std::string& place, const std::vector<LayerSpec>& specs,
                   Translation& out) {
  for (const LayerSpec& spec : specs) {
    out.demands.push_back({.key = key, .place = place, .written = spec.written, .last = spec.last});
  }
}

// What layer_swap and op_swap choose, all entries together.
struct Swapped {
  std::vector<std::string> layers;               // as written
  std::set<int64_t> whole;                       // the same by index
  std::map<int64_t, std::set<std::string>> ops;  // modules of a layer that is not swapped whole

  bool empty() const { return whole.empty() && ops.empty(); }

  std::vector<std::string> modules() const {
    std::vector<std::string> patterns;
    for (const auto& [layer, modules] : ops) {
      for (const std::string& module : modules) patterns.push_back(pattern(layer, module));
    }
    return patterns;
  }
  int64_t last() const {
    const int64_t last_op = ops.empty() ? -1 : ops.rbegin()->first;
    return std::max(whole.empty() ? -1 : *whole.rbegin(), last_op);
  }
  // The same distance in units of ours, of which a layer may have several.
  int64_t units_ahead(int64_t layers_ahead) const {
    if (empty()) return layers_ahead;
    size_t total = whole.size();
    size_t per_layer = 1;
    for (const auto& [layer, modules] : ops) {
      total += modules.size();
      per_layer = std::max(per_layer, modules.size());
    }
    return std::min(layers_ahead * static_cast<int64_t>(per_layer), static_cast<int64_t>(total) - 1);
  }
};

template <class Visit>
void for_each_entry(const BlockReader& block, const char* name, const Visit& visit) {
  const BlockNode* list = block.find(name);
  if (list == nullptr) return;
  if (list->kind != Kind::kList) throw_bad_block_value(block.path_of(name), *list, "a list of entries with layers");
  for (size_t i = 0; i < list->items.size(); ++i) {
    const BlockReader entry(concat(block.path_of(name), "[", i, "]"), list->items[i], concat("swap.", name, "[]"),
                            mindformers_keys());
    const BlockNode* layers = entry.find("layers");
    NEAP_CHECK(layers != nullptr, "[", list->items[i].place, "] ", entry.path_of("layers"),
               ": this key is required: a list of layers such as ['0-3']");
    visit(entry, read_layers(entry.path_of("layers"), *layers));
  }
}

Swapped read_swapped(const BlockReader& block, Translation& out) {
  Swapped swapped;
  for_each_entry(block, "layer_swap", [&](const BlockReader& entry, const std::vector<LayerSpec>& specs) {
    for (const LayerSpec& spec : specs) swapped.layers.push_back(spec.written);
    for (const int64_t layer : layers_of(specs)) swapped.whole.insert(layer);
    demand_layers("offload.layers", entry.origin("layers"), specs, out);
  });
  for_each_entry(block, "op_swap", [&](const BlockReader& entry, const std::vector<LayerSpec>& specs) {
    const BlockNode* op = entry.find("op_name");
    NEAP_CHECK(op != nullptr, "[", entry.place(), "] ", entry.path_of("op_name"),
               ": this key is required: a module of a layer such as attention or mlp");
    const std::string module = module_of(entry.path_of("op_name"), *op, op->text);
    for (const int64_t layer : layers_of(specs)) {
      if (!swapped.whole.contains(layer)) swapped.ops[layer].insert(module);
    }
    demand_layers("offload.modules", entry.origin("layers"), specs, out);
  });
  return swapped;
}

void claim(std::initializer_list<const char*> paths, const BlockReader& block, Translation& out) {
  for (const char* path : paths) out.claims.push_back({path, block.path(), block.place()});
}

const BlockNode* entry_of(const BlockNode& map, std::string_view name) {
  for (size_t i = 0; i < map.names.size(); ++i) {
    if (map.names[i] == name) return &map.items[i];
  }
  return nullptr;
}

// The key that makes a recompute section MindFormers'; null when there is none.
const BlockNode* telling_entry(const BlockNode& recompute, std::string& name) {
  for (const char* key : {"full_recompute_layer", "select_module", "exclude_op", "mode"}) {
    const BlockNode* node = entry_of(recompute, key);
    if (node == nullptr) continue;
    name = key;
    if (name != "mode" || (node->kind == Kind::kScalar && (node->text == "None" || node->text == "select"))) {
      return node;
    }
  }
  return nullptr;
}

std::vector<std::string> selected_modules(const BlockReader& block, Translation& out) {
  const BlockNode* node = block.find("select_module");
  const std::string path = block.path_of("select_module");
  if (node == nullptr || node->kind != Kind::kMap || node->items.empty()) {
    NEAP_CHECK(node != nullptr, "[", block.origin("mode"), "] select needs ", path,
               ": modules of a layer with their layers, such as {mlp: ['0-3']}");
    throw_bad_block_value(path, *node, "modules of a layer with their layers, such as {mlp: ['0-3']}");
  }
  std::vector<std::string> patterns;
  for (size_t i = 0; i < node->names.size(); ++i) {
    const BlockNode named{.kind = Kind::kScalar, .place = node->items[i].place, .text = node->names[i]};
    const std::string module = module_of(path, named, node->names[i]);
    const std::vector<LayerSpec> specs = read_layers(path + "." + node->names[i], node->items[i]);
    for (const int64_t layer : layers_of(specs)) patterns.push_back(pattern(layer, module));
    demand_layers("recompute.modules", concat(node->items[i].place, ", ", path, ".", node->names[i]), specs, out);
  }
  return patterns;
}

// A dimension of parallelism that there is not: 1 is what every run has.
void expect_one(const BlockReader& block, const char* name) {
  const BlockNode* node = block.find(name);
  if (node == nullptr || (node->kind == Kind::kScalar && node->text == "1")) return;
  throw_bad_block_value(block.path_of(name), *node, "1, as models are split over ranks by data_parallel_shard alone");
}

std::string stage_of(const BlockReader& block) {
  const std::string strategy =
      block.word("data_parallel_shard_strategy", {"optim_grads_params", "optim_grads", "optim"});
  const std::string reshard = block.word("reshard_after_forward_policy", {"default", "always", "never"});
  const bool parameters = strategy == "optim_grads_params";
  NEAP_CHECK(reshard != "always" || parameters, "[", block.origin("reshard_after_forward_policy"),
             "] always shards parameters again, but data_parallel_shard_strategy: ", strategy,
             " keeps them whole; choose optim_grads_params, or default");
  // Parameters that stay from forward to the end of backward are what optim_grads means.
  return reshard == "never" && parameters ? "optim_grads" : strategy;
}

}  // namespace

const std::vector<BlockKey>& mindformers_keys() {
  static const std::vector<BlockKey> keys = {
      {"swap.enable", "true or false [false]", "`offload.mode: async`, or `off`"},
      {"swap.default_prefetch", "integer from 1 [1]",
       "`offload.prefetch`: layer L comes back while layer L + N runs, so every swapped layer must have one that "
       "comes N later"},
      {"swap.layer_swap", "list of entries", "`offload.layers`, all entries together; with `op_swap` neither: all"},
      {"swap.layer_swap[].layers", "list of numbers and ranges", "whole layers"},
      {"swap.op_swap", "list of entries", "`offload.modules`"},
      {"swap.op_swap[].op_name", "module of a layer", "`attention`, `mlp`, …"},
      {"swap.op_swap[].layers", "list of numbers and ranges", "the layers whose module it is"},
      {"recompute.mode", "None, full or select", "`recompute.mode`"},
      {"recompute.full_recompute_layer", "list of numbers and ranges", "`recompute.layers`"},
      {"recompute.select_module", "modules with their layers", "`recompute.modules`"},
      {"recompute.exclude_op", "empty", "operators cannot be left out of what runs again"},
      {"recompute_config.recompute", "true, false or a number of layers", "`recompute.mode`, the first layers"},
      {"recompute_config.select_recompute", "false", "chooses operators of a compiled graph: `recompute.modules`"},
      {"recompute_config.select_comm_recompute", "false", "the same of communication"},
      {"recompute_config.parallel_optimizer_comm_recompute", "true or false", "`parallel.stage` decides"},
      {"recompute_config.mp_comm_recompute", "true or false", "no meaning without tensor parallelism"},
      {"recompute_config.recompute_slice_activation", "true or false", "no meaning without tensor parallelism"},
      {"parallelism.data_parallel_shard", "integer or -1", "`parallel.shard`"},
      {"parallelism.data_parallel_replicate", "integer", "`parallel.replicate`"},
      {"parallelism.data_parallel_shard_strategy", "optim, optim_grads or optim_grads_params", "`parallel.stage`"},
      {"parallelism.reshard_after_forward_policy", "always, never or default",
       "never: `parallel.stage: optim_grads` instead of optim_grads_params"},
      {"parallelism.disable_gradient_division", "true",
       "gradients are means over all tokens of the step and are not divided again: `parallel.reduce_op: avg`"},
      {"parallelism.cpu_offload", "false", "parameters stay on the device"},
      {"parallelism.tensor_parallel", "1", "other dimensions there are not"},
      {"parallelism.context_parallel", "1", ""},
      {"parallelism.pipeline_parallel", "1", ""},
      {"parallelism.expert_parallel", "1", ""},
      {"parallelism.sequence_parallel", "true or false", "no meaning without tensor parallelism"},
  };
  return keys;
}

bool has_mindformers_shape(const BlockNode& recompute) {
  std::string name;
  return recompute.kind == Kind::kMap && telling_entry(recompute, name) != nullptr;
}

void translate_swap(const ForeignBlock& found, Translation& out) {
  const BlockReader block(found.path, found.node, "swap", mindformers_keys());
  const bool enabled = block.boolean("enable", false);
  const int64_t ahead = block.integer("default_prefetch", 1, 1, kMost);
  const size_t demands = out.demands.size();
  const Swapped swapped = read_swapped(block, out);
  if (!enabled) {
    out.demands.resize(demands);  // what is switched off asks nothing of the model
  } else {
    out.demands.push_back({.key = "offload.prefetch",
                           .place = block.origin("default_prefetch"),
                           .written = {},
                           .last = swapped.last(),
                           .ahead = ahead});
  }
  claim({"offload.mode", "offload.prefetch", "offload.layers", "offload.modules"}, block, out);
  out.values.push_back({"offload.mode", one(enabled ? "async" : "off", block.origin("enable"))});
  out.values.push_back(
      {"offload.prefetch", one(std::to_string(swapped.units_ahead(ahead)), block.origin("default_prefetch"))});
  out.values.push_back({"offload.layers", many(swapped.layers, block.origin("layer_swap"))});
  out.values.push_back({"offload.modules", many(swapped.modules(), block.origin("op_swap"))});
}

void translate_recompute(const ForeignBlock& found, Translation& out) {
  std::string telling;
  const BlockNode* sign = telling_entry(found.node, telling);
  NEAP_ASSERT(sign != nullptr, "not MindFormers' recompute");
  for (const char* ours : {"modules", "layers", "preserve_rng", "early_stop", "debug"}) {
    const BlockNode* node = entry_of(found.node, ours);
    NEAP_CHECK(node == nullptr, "[", node->place, "] recompute.", ours, " is a key of our own section, but recompute.",
               telling, " (", sign->place, ") is MindFormers'; write the section in one of the two ways");
  }
  const BlockReader block(found.path, found.node, "recompute", mindformers_keys());
  const std::string mode = block.word("mode", {"None", "full", "select"});
  if (const BlockNode* excluded = block.find("exclude_op")) {
    const bool empty = excluded->kind != Kind::kScalar && excluded->items.empty();
    if (!empty) throw_bad_block_value(block.path_of("exclude_op"), *excluded, "nothing, as whole modules run again");
  }
  claim({"recompute.mode", "recompute.layers", "recompute.modules"}, block, out);
  out.values.push_back({"recompute.mode", one(mode == "None" ? "none" : "selective", block.origin("mode"))});
  if (mode == "full") {
    const BlockNode* layers = block.find("full_recompute_layer");
    NEAP_CHECK(layers != nullptr, "[", block.origin("mode"),
               "] full needs recompute.full_recompute_layer: a list of layers such as ['0-3']");
    const std::vector<LayerSpec> specs = read_layers(block.path_of("full_recompute_layer"), *layers);
    std::vector<std::string> written;
    written.reserve(specs.size());
    for (const LayerSpec& spec : specs) written.push_back(spec.written);
    out.values.push_back({"recompute.layers", many(std::move(written), block.origin("full_recompute_layer"))});
    demand_layers("recompute.layers", block.origin("full_recompute_layer"), specs, out);
  } else if (mode == "select") {
    out.values.push_back({"recompute.modules", many(selected_modules(block, out), block.origin("select_module"))});
  }
}

void translate_recompute_config(const ForeignBlock& found, Translation& out) {
  const BlockReader block(found.path, found.node, "recompute_config", mindformers_keys());
  for (const char* name : {"select_recompute", "select_comm_recompute"}) {
    const BlockNode* node = block.find(name);
    const bool off = node == nullptr || (node->kind == Kind::kScalar && !block.boolean(name, false));
    if (!off) {
      throw_bad_block_value(block.path_of(name), *node,
                            "false, as it chooses operators of a compiled graph (recompute.modules chooses modules)");
    }
  }
  for (const char* name : {"parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation"}) {
    block.boolean(name, false);
  }
  claim({"recompute.mode", "recompute.layers", "recompute.modules"}, block, out);
  const std::string place = block.origin("recompute");
  const BlockNode* node = block.find("recompute");
  // One number for each pipeline stage, and there is one stage.
  if (node != nullptr && node->kind == Kind::kList && node->items.size() == 1) node = &node->items.front();
  const bool number = node != nullptr && node->kind == Kind::kScalar && !node->text.empty() &&
                      node->text.find_first_not_of("0123456789") == std::string::npos && node->text.size() < 7;
  if (!number) {
    if (node != nullptr && node->kind != Kind::kScalar) {
      throw_bad_block_value(block.path_of("recompute"), *node, "true, false or the number of layers of one stage");
    }
    out.values.push_back({"recompute.mode", one(block.boolean("recompute", false) ? "full" : "none", place)});
    return;
  }
  const int64_t count = std::stoll(node->text);
  out.values.push_back({"recompute.mode", one(count > 0 ? "selective" : "none", place)});
  if (count == 0) return;
  const std::string range = concat("0-", count - 1);
  out.values.push_back({"recompute.layers", many({range}, place)});
  out.demands.push_back({.key = "recompute.layers", .place = place, .written = range, .last = count - 1});
}

void translate_parallelism(const ForeignBlock& found, Translation& out) {
  const BlockReader block(found.path, found.node, "parallelism", mindformers_keys());
  for (const char* name : {"tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"}) {
    expect_one(block, name);
  }
  block.boolean("sequence_parallel", false);
  if (block.boolean("cpu_offload", false)) {
    throw_bad_block_value(block.path_of("cpu_offload"), *block.find("cpu_offload"),
                          "false, as parameters and optimizer state stay on the device");
  }
  if (!block.boolean("disable_gradient_division", true)) {
    throw_bad_block_value(block.path_of("disable_gradient_division"), *block.find("disable_gradient_division"),
                          "true, as gradients are means over all tokens of the step already");
  }
  const auto pass = [&](const char* name, const char* path, const std::string& value) {
    claim({path}, block, out);
    out.values.push_back({path, one(value, block.origin(name))});
  };
  if (block.find("data_parallel_shard") != nullptr) {
    const int64_t shard = block.integer("data_parallel_shard", -1, -1, kMost);
    if (shard == 0)
      throw_bad_block_value(block.path_of("data_parallel_shard"), *block.find("data_parallel_shard"),
                            "a number of ranks, or -1 for all of them");
    pass("data_parallel_shard", "parallel.shard", std::to_string(shard));
  }
  if (block.find("data_parallel_replicate") != nullptr) {
    pass("data_parallel_replicate", "parallel.replicate",
         std::to_string(block.integer("data_parallel_replicate", 1, 1, kMost)));
  }
  const std::string stage = stage_of(block);
  for (const char* name : {"data_parallel_shard_strategy", "reshard_after_forward_policy"}) {
    if (block.find(name) == nullptr) continue;
    pass(name, "parallel.stage", stage);
    break;
  }
}

}  // namespace neap::train::internal
