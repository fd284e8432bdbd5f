// A model as sharding sees it, in whatever language its modules are written.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace neap::autograd {
class HookPoint;
}

namespace neap::shard {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

struct NamedUnit {
  std::string name;                        // "" for the root
  autograd::HookPoint* point = nullptr;    // that the unit's forward runs through
  std::vector<NamedParameter> parameters;  // in the order of the model; a tied one under each of its names
};

}  // namespace neap::shard
