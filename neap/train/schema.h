// torch-free
// The one schema of a run file: path, type, default, range and meaning of every key. The YAML reader, the command
// line, `neap train --help` and docs/config.md are all driven by this table, so they cannot disagree.
//
// Thread-safe: the table is built once and never changes.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "neap/train/config.h"

namespace neap::train {

// A value as it was written, before a key gives it a type.
struct RawValue {
  std::vector<std::string> items;
  bool is_list = false;
  std::string place;  // "run.yaml:12" or "command line", for messages
};

struct Key {
  std::string path;  // "train.steps"
  std::string type;  // "integer", "size", "a or b", …: what the file may hold
  std::string range;
  std::string help;
  bool required = false;
  // Writes the value into the config. Throws UserError naming place, path, what was expected and what was found.
  std::function<void(RunConfig&, const RawValue&)> set;
  // The value as one would write it in the file.
  std::function<std::string(const RunConfig&)> show;
};

// In the order of the documentation: grouped by section.
const std::vector<Key>& keys();

const Key* find_key(std::string_view path);
bool is_section(std::string_view path);

// The known key or section that `path` most probably meant.
std::string nearest_key(std::string_view path);

// Throws the UserError for a path that no key has.
[[noreturn]] void throw_unknown_key(std::string_view path, std::string_view place);

// What no single key can check: required keys, and keys that contradict each other.
void check(const RunConfig& config);

// What a run that goes on has behind it, in steps that may have had another size.
struct TakenBefore {
  int64_t steps = 0;
  int64_t tokens = 0;
};

// With train.global_batch turned into train.accumulation, and train.tokens into train.steps: as many as take in all the
// tokens that are not taken yet, beside the steps before. UserError when a step cannot be divided among the ranks.
RunConfig resolve(RunConfig config, int64_t ranks, TakenBefore before = {});

// The whole configuration as YAML, every key written out.
std::string to_yaml(const RunConfig& config);

// The keys as text for a terminal, and as the Markdown page docs/config.md.
std::string help_text();
std::string markdown_page();

}  // namespace neap::train
