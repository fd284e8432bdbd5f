// Splits the command line: `--train.steps=20` is an override of the run file, the rest is for CLI11.
#pragma once

#include <string>
#include <vector>

#include "neap/train/yaml_config.h"

namespace neap::cli {

struct CommandLine {
  std::vector<std::string> arguments;  // in order, without the program's name
  std::vector<train::Override> overrides;
};

// An override is an option with a dot in its name; its value follows after `=` or as the next argument. UserError when
// the value is missing.
CommandLine split_command_line(int argc, const char* const* argv);

}  // namespace neap::cli
