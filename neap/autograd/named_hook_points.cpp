#include "neap/autograd/named_hook_points.h"

#include <torch/nn/module.h>

#include <utility>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/unit_selection.h"

namespace neap::autograd {
namespace {

// Not Module::named_modules(): that needs a root owned by a shared_ptr.
template <class Visit>
void visit_modules(const std::string& name, torch::nn::Module& module, const Visit& visit) {
  visit(name, module);
  for (const auto& child : module.named_children()) {
    visit_modules(name.empty() ? child.key() : name + "." + child.key(), *child.value(), visit);
  }
}

}  // namespace

std::vector<NamedHookPoint> find_hookables(torch::nn::Module& root) {
  std::vector<NamedHookPoint> found;
  visit_modules("", root, [&](const std::string& name, torch::nn::Module& module) {
    if (auto* hookable = dynamic_cast<Hookable*>(&module)) {
      found.push_back({name, &hookable->hook_point(), found.size()});
    }
  });
  return found;
}

std::vector<std::string> module_names(torch::nn::Module& root) {
  std::vector<std::string> names;
  visit_modules("", root, [&](const std::string& name, torch::nn::Module&) { names.push_back(name); });
  return names;
}

std::vector<NamedHookPoint> select_hook_points(torch::nn::Module& root, const std::vector<std::string>& patterns,
                                               std::string_view section) {
  return select_model_units(root, patterns, section).units;
}

ModelUnits select_model_units(torch::nn::Module& root, const std::vector<std::string>& patterns,
                              std::string_view section) {
  const std::vector<NamedHookPoint> points = find_hookables(root);
  ModelNames names{module_names(root), {}};
  for (const NamedHookPoint& point : points) names.units.push_back(point.name);
  const std::vector<std::size_t> chosen = select_units(names, patterns, section);
  ModelUnits model{.identity = &root, .parameters_and_buffers = parameters_and_buffers(root)};
  for (const std::size_t i : chosen) model.units.push_back(points[i]);
  for (const std::size_t i : units_after(names.units, chosen)) model.after_units.push_back(points[i]);
  return model;
}

std::vector<at::Tensor> parameters_and_buffers(const torch::nn::Module& model) {
  std::vector<at::Tensor> all = model.parameters();
  for (at::Tensor& buffer : model.buffers()) all.push_back(std::move(buffer));
  std::erase_if(all, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return all;
}

}  // namespace neap::autograd
