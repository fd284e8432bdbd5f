// The hook points of a model, by the dotted names of its modules, and the tensors it owns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Module;
}

namespace neap::autograd {

class HookPoint;

struct NamedHookPoint {
  std::string name;       // as in named_modules(): "model.layers.0.mlp"; the root's own name is ""
  HookPoint* point;       // lives as long as its module
  std::size_t order = 0;  // among the hook points of the model
};

// Every module that is Hookable, the root included, parents before children, in the order of registration. A module
// that is registered in two places is listed under both names, with the same point.
std::vector<NamedHookPoint> find_hookables(torch::nn::Module& root);

// The names of all modules in the same order, Hookable or not; for messages about names that match nothing.
std::vector<std::string> module_names(torch::nn::Module& root);

// The hook points that the patterns choose (unit_selection.h), in the order of the model; no patterns means the model's
// own list of layers. UserErrors begin with `[section.modules]` or `[section.layers]`.
std::vector<NamedHookPoint> select_hook_points(torch::nn::Module& root, const std::vector<std::string>& patterns,
                                               std::string_view section);

// What belongs to the model: its defined parameters and buffers, all modules'. For registries of resident storages.
std::vector<at::Tensor> parameters_and_buffers(const torch::nn::Module& model);

}  // namespace neap::autograd
