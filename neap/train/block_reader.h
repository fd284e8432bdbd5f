// torch-free
// Reading one block of a run file that has the keys of another system: strict like our own sections, with errors that
// name line, path, what was expected and what was found.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "neap/train/schema.h"

namespace neap::train {

// A value of a YAML file with the place where it was written.
struct BlockNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string place = {};               // "run.yaml:12"
  std::string text = {};                // kScalar
  std::vector<std::string> names = {};  // kMap: of the items
  std::vector<BlockNode> items = {};    // kList, kMap
};

// One key of such a block, for reading and for the documentation. Members of the entries of a list are written
// "swap.layer_swap[].layers".
struct BlockKey {
  std::string path;
  std::string value;    // what the file may hold
  std::string meaning;  // in keys of our own
};

namespace internal {

// `[place] path: expected …; found …`.
[[noreturn]] void throw_bad_block_value(const std::string& path, const BlockNode& node, const std::string& expected);

// Layers of the model, by index: "5", "0-3", also the other way round.
struct LayerSpec {
  std::string written;
  int64_t first = 0, last = 0;
};
// A list of them, or one alone.
std::vector<LayerSpec> read_layers(const std::string& path, const BlockNode& node);
// Each index once, ascending.
std::vector<int64_t> layers_of(const std::vector<LayerSpec>& specs);

// The keys of one map. An absent key and one without a value (`layer_swap:`) are the same.
class BlockReader {
 public:
  // UserError when `node` is no map, has a key twice, or one that `known` does not list under `schema`. `path` is where
  // the map lies in this file: "swap.layer_swap[1]" for the schema "swap.layer_swap[]".
  BlockReader(std::string path, const BlockNode& node, const std::string& schema, const std::vector<BlockKey>& known);

  const std::string& path() const { return path_; }
  const std::string& place() const { return node_.place; }
  const BlockNode* find(std::string_view name) const;
  std::string path_of(std::string_view name) const { return path_ + "." + std::string(name); }
  // "run.yaml:12, swap.enable": where a value of ours came from.
  std::string origin(std::string_view name) const;

  bool boolean(std::string_view name, bool otherwise) const;
  int64_t integer(std::string_view name, int64_t otherwise, int64_t low, int64_t high) const;
  // At least 0 and finite.
  double amount(std::string_view name, double otherwise) const;
  // One of `words`; the first of them when the key is absent.
  std::string word(std::string_view name, const std::vector<std::string>& words) const;
  std::vector<std::string> texts(std::string_view name) const;

 private:
  std::string path_;
  const BlockNode& node_;
};

RawValue one(std::string text, std::string place);
RawValue many(std::vector<std::string> texts, std::string place);

}  // namespace internal
}  // namespace neap::train
