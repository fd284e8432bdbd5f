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

std::vector<std::string> names_of(const std::vector<NamedHookPoint>& points) {
  std::vector<std::string> names;
  for (const NamedHookPoint& point : points) names.push_back(point.name);
  return names;
}

std::vector<NamedHookPoint> at_indices(const std::vector<NamedHookPoint>& points,
                                       const std::vector<std::size_t>& indices) {
  std::vector<NamedHookPoint> chosen;
  for (const std::size_t i : indices) chosen.push_back(points[i]);
  return chosen;
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
  const std::vector<NamedHookPoint> points = find_hookables(root);
  return at_indices(points, select_units({module_names(root), names_of(points)}, patterns, section));
}

ModelUnits select_model_units(torch::nn::Module& root, const std::vector<std::string>& patterns,
                              std::string_view section) {
  ModelUnits model{&root, select_hook_points(root, patterns, section), {}, parameters_and_buffers(root)};
  const std::vector<NamedHookPoint> points = find_hookables(root);
  std::vector<std::size_t> chosen;
  for (const NamedHookPoint& unit : model.units) chosen.push_back(unit.order);
  model.after_units = at_indices(points, units_after(names_of(points), chosen));
  return model;
}

std::vector<at::Tensor> parameters_and_buffers(const torch::nn::Module& model) {
  std::vector<at::Tensor> all = model.parameters();
  for (at::Tensor& buffer : model.buffers()) all.push_back(std::move(buffer));
  std::erase_if(all, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return all;
}

}  // namespace neap::autograd
