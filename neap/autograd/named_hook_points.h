// The hook points of a model, by the dotted names of its modules, and the tensors it owns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
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

// A model as features see it, in whatever language its modules are written: the units they are to work on, and what is
// never theirs to move.
struct ModelUnits {
  const void* identity = nullptr;                    // tells models apart; compared only, never followed
  std::vector<NamedHookPoint> units{};               // in the order of the model
  std::vector<NamedHookPoint> after_units{};         // what runs after the last of them (units_after())
  std::vector<at::Tensor> parameters_and_buffers{};  // all modules', defined
  // Lists them again when some have gone, as they do where moving a model replaces them; none: they stay the same.
  // Called on threads that run forward, with no lock held.
  std::function<std::vector<at::Tensor>()> list_again{};
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

// The units that the patterns choose, what runs after them, and what belongs to the model.
ModelUnits select_model_units(torch::nn::Module& root, const std::vector<std::string>& patterns,
                              std::string_view section);

// What belongs to the model: its defined parameters and buffers, all modules'. For registries of resident storages.
std::vector<at::Tensor> parameters_and_buffers(const torch::nn::Module& model);

}  // namespace neap::autograd
