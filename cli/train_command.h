// `neap train FILE`.
#pragma once

#include <string>
#include <vector>

#include "neap/train/yaml_config.h"

namespace neap::cli {

struct TrainArguments {
  std::string file;
  bool dry_run = false;
  std::vector<train::Override> overrides;
};

// The exit code.
int train(const TrainArguments& arguments);

}  // namespace neap::cli
