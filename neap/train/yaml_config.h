// torch-free
// Reads a run file: strict YAML, then the command line's overrides, then the checks across keys.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "neap/train/config.h"

namespace neap::train {

// ("train.steps", "20"): one `--train.steps=20` of the command line.
using Override = std::pair<std::string, std::string>;

// Throws UserError for a missing or unreadable file, broken YAML, an unknown or repeated key, a bad value.
// An empty log.dir becomes runs/<stem of the file>.
RunConfig load_config(const std::filesystem::path& file, const std::vector<Override>& overrides);

// The same for a text; `name` stands for the file in messages.
RunConfig parse_config(const std::string& yaml, const std::string& name, const std::vector<Override>& overrides);

}  // namespace neap::train
