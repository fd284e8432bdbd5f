// torch-free
// VeOmni's offload_config (veomni/arguments, classes AcceleratorConfig and OffloadConfig; pull requests 965 and 1175).
#include <string>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/train/foreign_blocks.h"

namespace neap::train::internal {
namespace {

constexpr double kLargestGib = 1 << 30;  // beyond it a size no longer fits 64 bits

std::string gib(const BlockReader& block, std::string_view name) {
  const double value = block.amount(name, 0);
  if (value > kLargestGib) throw_bad_block_value(block.path_of(name), *block.find(name), "GiB that fit 64 bits");
  return std::to_string(static_cast<int64_t>(value * (int64_t{1} << 30)));
}

}  // namespace

const std::vector<BlockKey>& veomni_keys() {
  static const std::vector<BlockKey> keys = {
      {"offload_config.enable_activation", "true or false [false]", "`offload.mode: sync`"},
      {"offload_config.enable_async_activation", "true or false [false]",
       "`offload.mode: async`; both at once are an error, neither is `off`"},
      {"offload_config.activation_gpu_limit", "GiB [0]", "`offload.device_budget`, in both modes"},
      {"offload_config.activation_offload_modules", "list of patterns [all layers]",
       "`offload.modules`; without one of the two switches an error"},
      {"offload_config.activation_offload_host_cache_limit_gb", "GiB [4]", "`offload.host_cache_limit`"},
  };
  return keys;
}

void translate_accelerator(const ForeignBlock& accelerator, Translation& out) {
  static const std::vector<BlockKey> known = {{"accelerator.offload_config", "", ""}};
  const BlockReader outer(accelerator.path, accelerator.node, "accelerator", known);
  const BlockNode* node = outer.find("offload_config");
  if (node == nullptr) return;
  const BlockReader block(outer.path_of("offload_config"), *node, "offload_config", veomni_keys());
  const bool sync = block.boolean("enable_activation", false);
  const bool async = block.boolean("enable_async_activation", false);
  NEAP_CHECK(!sync || !async, "[", block.origin("enable_async_activation"),
             "] expected one way of activation offload; found enable_activation on as well; switch one of them off");
  std::vector<std::string> modules = block.texts("activation_offload_modules");
  NEAP_CHECK(modules.empty() || sync || async, "[", block.origin("activation_offload_modules"),
             "] expected enable_async_activation: true or enable_activation: true beside modules; found both off; "
             "switch one on, or take the modules out");

  const auto claim = [&](const char* path, std::string_view name) {
    out.claims.push_back({path, block.path(), block.origin(name)});
  };
  const std::string_view switched = sync ? "enable_activation" : "enable_async_activation";
  claim("offload.mode", switched);
  out.values.push_back({"offload.mode", one(sync ? "sync" : async ? "async" : "off", block.origin(switched))});
  claim("offload.modules", "activation_offload_modules");
  claim("offload.layers", "activation_offload_modules");
  out.values.push_back({"offload.modules", many(std::move(modules), block.origin("activation_offload_modules"))});
  for (const auto& [name, path] : {std::pair{"activation_gpu_limit", "offload.device_budget"},
                                   std::pair{"activation_offload_host_cache_limit_gb", "offload.host_cache_limit"}}) {
    if (block.find(name) == nullptr) continue;
    claim(path, name);
    out.values.push_back({path, one(gib(block, name), block.origin(name))});
  }
}

}  // namespace neap::train::internal
