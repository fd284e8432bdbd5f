// Which unit each parameter of a model belongs to; internal to the layer.
#pragma once

#include <string>
#include <vector>

#include "neap/shard/flat_group.h"
#include "neap/shard/options.h"

namespace torch::nn {
class Module;
}

namespace neap::shard {

struct OwnedUnit {
  std::string name;  // "" for the root
  torch::nn::Module* module;
  std::vector<NamedParameter> parameters;
};

// The units that `modules` selects, in the order of the model, and the root last. A tied parameter appears once, under
// its first name. UserError for what the units cannot share.
std::vector<OwnedUnit> assign_parameters(torch::nn::Module& model, const std::vector<std::string>& modules);

}  // namespace neap::shard
