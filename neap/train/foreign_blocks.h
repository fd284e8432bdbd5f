// torch-free
// Blocks of run files of other systems, which people bring along, translated into keys of our own:
//
//   MindFormers  swap, recompute in its own shape, recompute_config, parallelism      (mindformers_blocks.cpp)
//   VeOmni       offload_config under train.accelerator and model.accelerator         (veomni_block.cpp)
//
// After the translation nobody knows where a value came from: the configuration that a run prints and leaves behind has
// our own sections alone. What such a block asks of the number of layers is checked when the model is known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "neap/train/block_reader.h"
#include "neap/train/config.h"

namespace neap::train {

struct ForeignBlock {
  std::string path;  // "swap", "train.accelerator"
  BlockNode node;
};

// Whether `value`, found at `path` of a run file, is such a block. For `recompute`, which is a section of ours, too,
// its shape decides: full_recompute_layer, select_module or exclude_op, or a mode that we do not have.
bool is_foreign_block(std::string_view path, const BlockNode& value);

// What the blocks come to. A block stands for every key that it has an opinion on: such a key has no second source.
struct Translation {
  struct Value {
    std::string path;  // of our own key
    RawValue raw;      // its place names the foreign key, too
  };
  struct Claim {
    std::string path;   // of our own key
    std::string block;  // "swap"
    std::string place;
  };
  std::vector<Value> values;
  std::vector<Claim> claims;
  std::vector<LayerDemand> demands;
};
// UserError for keys that the block does not have, bad values, and what contradicts itself.
Translation translate(const std::vector<ForeignBlock>& blocks);

// Once the model is known. UserError for a demand that a model of so many layers does not meet.
void check_demands(const std::vector<LayerDemand>& demands, int64_t num_layers);

// "swap.enable": a name that only a run file can have, not the command line.
bool is_foreign_name(std::string_view path);

// The part of docs/config.md about them.
std::string foreign_markdown();

namespace internal {

const std::vector<BlockKey>& mindformers_keys();
const std::vector<BlockKey>& veomni_keys();
bool has_mindformers_shape(const BlockNode& recompute);
void translate_swap(const ForeignBlock& block, Translation& out);
void translate_recompute(const ForeignBlock& block, Translation& out);
void translate_recompute_config(const ForeignBlock& block, Translation& out);
void translate_parallelism(const ForeignBlock& block, Translation& out);
void translate_accelerator(const ForeignBlock& block, Translation& out);

}  // namespace internal
}  // namespace neap::train
