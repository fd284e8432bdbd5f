// torch-free
#include "neap/train/foreign_blocks.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

#include "neap/base/error.h"

namespace neap::train {
namespace {

using Translate = void (*)(const ForeignBlock&, Translation&);

constexpr std::array<std::pair<std::string_view, Translate>, 6> kBlocks = {{
    {"swap", internal::translate_swap},
    {"recompute", internal::translate_recompute},
    {"recompute_config", internal::translate_recompute_config},
    {"parallelism", internal::translate_parallelism},
    {"train.accelerator", internal::translate_accelerator},
    {"model.accelerator", internal::translate_accelerator},
}};

void add_table(const char* title, const std::vector<BlockKey>& keys, std::ostream& out) {
  out << "\n### " << title << "\n\n| key | value | meaning here |\n|---|---|---|\n";
  for (const BlockKey& key : keys) {
    out << "| `" << key.path << "` | " << key.value << " | " << key.meaning << " |\n";
  }
}

}  // namespace

bool is_foreign_block(std::string_view path, const BlockNode& value) {
  if (path == "recompute") return internal::has_mindformers_shape(value);
  return std::ranges::any_of(kBlocks, [&](const auto& block) { return block.first == path; });
}

bool is_foreign_name(std::string_view path) {
  return std::ranges::any_of(kBlocks, [&](const auto& block) {
    return block.first != "recompute" && path.starts_with(block.first) &&
           (path.size() == block.first.size() || path[block.first.size()] == '.');
  });
}

Translation translate(const std::vector<ForeignBlock>& blocks) {
  Translation out;
  for (const ForeignBlock& block : blocks) {
    const auto* found = std::ranges::find(kBlocks, std::string_view(block.path), [](const auto& b) { return b.first; });
    NEAP_ASSERT(found != kBlocks.end(), block.path);
    if (block.node.kind != BlockNode::Kind::kNull) found->second(block, out);
  }
  return out;
}

void check_demands(const std::vector<LayerDemand>& demands, int64_t num_layers) {
  for (const LayerDemand& demand : demands) {
    NEAP_CHECK(demand.last < num_layers, "[", demand.place, "] expected layers from 0 to ", num_layers - 1, "; found ",
               demand.written);
    NEAP_CHECK(demand.ahead < num_layers, "[", demand.place, "] expected less than the number of layers, which is ",
               num_layers, "; found ", demand.ahead);
    NEAP_CHECK(demand.last + demand.ahead < num_layers, "[", demand.place,
               "] links every swapped layer with the one that comes ", demand.ahead, " later; layer ", demand.last,
               " has none, as the model's layers are 0 to ", num_layers - 1, "; swap fewer layers, or lower it");
  }
}

std::string foreign_markdown() {
  std::ostringstream out;
  out << "\n## Blocks of other systems\n\n"
         "These blocks are read as they are written for the system that they come from, in the run file alone. They\n"
         "are strict, too: an unknown key is an error, and so is a key of ours that such a block stands for already.\n"
         "The configuration that a run prints and leaves has our own sections alone, and the command line, which\n"
         "takes our own keys, wins over both.\n"
         "\n"
         "`recompute` is a section of ours and a block of MindFormers. It is read as theirs when it has\n"
         "`full_recompute_layer`, `select_module` or `exclude_op`, or the mode `None` or `select`; `mode: full` alone\n"
         "is ours. Modules of a layer have the names of Hugging Face here; MindFormers' `attention` and\n"
         "`self_attention` are taken for `self_attn`.\n";
  add_table("MindFormers", internal::mindformers_keys(), out);
  out << "\nIn a layer that is swapped and recomputed, the layer's inputs leave the device and the rest runs again.\n";
  add_table("VeOmni", internal::veomni_keys(), out);
  out << "\n`offload_config` lies under `train.accelerator` or, in later versions, under `model.accelerator`.\n";
  return out.str();
}

}  // namespace neap::train
