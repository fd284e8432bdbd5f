// Which unit each parameter of a model belongs to; internal to the layer.
#pragma once

#include <string>
#include <vector>

#include "neap/shard/named_unit.h"

namespace torch::nn {
class Module;
}

namespace neap::shard {

struct OwnedUnit {
  std::string name;  // "" for the root
  torch::nn::Module* module = nullptr;
  autograd::HookPoint* point = nullptr;  // null: the module has none
  std::vector<NamedParameter> parameters;
};

// The units that `modules` selects, in the order of the model, and the root last. A tied parameter appears once, under
// its first name. UserError for what the units cannot share.
std::vector<OwnedUnit> assign_parameters(torch::nn::Module& model, const std::vector<std::string>& modules);
// The same of units that somebody else has chosen, the root last; they have no modules then.
std::vector<OwnedUnit> assign_parameters(const std::vector<NamedUnit>& units);

}  // namespace neap::shard
