#include "neap/shard/parameter_owners.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/named_hook_points.h"
#include "neap/autograd/unit_selection.h"
#include "neap/base/error.h"

namespace neap::shard {
namespace {

struct NamedModule {
  std::string name;
  torch::nn::Module* module;
};

void list_modules(const std::string& name, torch::nn::Module& module, std::vector<NamedModule>& out) {
  out.push_back({name, &module});
  for (const auto& child : module.named_children()) {
    list_modules(name.empty() ? child.key() : name + "." + child.key(), *child.value(), out);
  }
}

// Only Hookable modules are found by default; a pattern may name any module, which then runs through Sharded::unit().
std::vector<std::string> candidates(torch::nn::Module& model, bool named) {
  std::vector<std::string> names;
  if (named) {
    for (std::string& name : autograd::module_names(model)) {
      if (!name.empty()) names.push_back(std::move(name));
    }
  } else {
    for (const auto& point : autograd::find_hookables(model)) {
      if (!point.name.empty()) names.push_back(point.name);
    }
  }
  return names;
}

bool inside(std::string_view name, std::string_view outer) {
  return name.size() > outer.size() && name.starts_with(outer) && name[outer.size()] == '.';
}

// Every parameter within `module` is registered nowhere else in the model; there is at least one.
bool owns_parameters(torch::nn::Module& module, const std::vector<NamedModule>& model) {
  std::vector<NamedModule> own;
  list_modules("", module, own);
  std::unordered_set<const torch::nn::Module*> within;
  std::unordered_set<const c10::TensorImpl*> parameters;
  for (const NamedModule& part : own) {
    within.insert(part.module);
    for (const at::Tensor& p : part.module->parameters(/*recurse=*/false)) parameters.insert(p.unsafeGetTensorImpl());
  }
  return !parameters.empty() && std::ranges::none_of(model, [&](const NamedModule& other) {
    return !within.contains(other.module) &&
           std::ranges::any_of(other.module->parameters(/*recurse=*/false),
                               [&](const at::Tensor& p) { return parameters.contains(p.unsafeGetTensorImpl()); });
  });
}

// Gives parameters to units, one after another.
class Owners {
 public:
  std::size_t add_unit(OwnedUnit unit) {
    units_.push_back(std::move(unit));
    return units_.size() - 1;
  }

  void add(const std::string& name, const at::Tensor& parameter, std::size_t owner) {
    if (!parameter.defined()) return;
    const auto [seen, is_new] = seen_.try_emplace(parameter.unsafeGetTensorImpl(), Seen{owner, name});
    if (!is_new) {
      NEAP_CHECK(seen->second.unit == owner, "[shard] expected every parameter to belong to one unit; found that '",
                 name, "' of ", describe(owner), " and '", seen->second.name, "' of ", describe(seen->second.unit),
                 " are the same; choose units so that one of them, or none, contains both");
      return;
    }
    check_memory(name, parameter);
    units_[owner].parameters.push_back({name, parameter});
  }

  std::vector<OwnedUnit> take() && { return std::move(units_); }

 private:
  struct Range {
    int64_t begin, end;
    std::string name;
  };
  struct Seen {
    std::size_t unit;
    std::string name;
  };

  // Two parameters that overlap would go apart, silently.
  void check_memory(const std::string& name, const at::Tensor& parameter) {
    if (parameter.numel() == 0 || parameter.is_meta() || !parameter.has_storage()) return;
    const auto begin = parameter.storage_offset() * static_cast<int64_t>(parameter.element_size());
    const auto end = begin + static_cast<int64_t>(parameter.nbytes());
    auto& others = ranges_[parameter.storage().unsafeGetStorageImpl()];
    for (const Range& other : others) {
      NEAP_CHECK(end <= other.begin || other.end <= begin,
                 "[shard] expected every parameter to have memory of its own; found that '", name, "' and '",
                 other.name, "' overlap; clone one of them, or register one tensor twice to tie them");
    }
    others.push_back({begin, end, name});
  }

  std::string describe(std::size_t unit) const {
    return units_[unit].name.empty() ? "no unit" : "unit '" + units_[unit].name + "'";
  }

  std::vector<OwnedUnit> units_;
  std::unordered_map<const c10::TensorImpl*, Seen> seen_;  // of tensors that units_ keeps
  std::unordered_map<const c10::StorageImpl*, std::vector<Range>> ranges_;
};

class Assignment {
 public:
  Assignment(torch::nn::Module& model, const std::vector<std::string>& patterns) {
    const autograd::ModelNames names{autograd::module_names(model), candidates(model, !patterns.empty())};
    std::vector<NamedModule> modules;
    list_modules("", model, modules);
    std::unordered_map<std::string, torch::nn::Module*> by_name;
    for (const NamedModule& module : modules) by_name.emplace(module.name, module.module);
    std::vector<std::size_t> chosen = autograd::select_units(names, patterns, "shard");
    if (patterns.empty()) chosen = with_units_beside(names.units, chosen, by_name, modules);
    for (const std::size_t i : chosen) add_unit(names.units[i], *by_name.at(names.units[i]));
    add_unit("", model);
    visit("", model, unit_of_.at(&model));
  }

  std::vector<OwnedUnit> take() && { return std::move(owners_).take(); }

 private:
  // The outermost of the units that neither lie in a layer nor contain one, such as an embedding or an output head.
  // What is tied to others stays with the root, as does what contains layers.
  static std::vector<std::size_t> with_units_beside(const std::vector<std::string>& names,
                                                    const std::vector<std::size_t>& layers,
                                                    const std::unordered_map<std::string, torch::nn::Module*>& by_name,
                                                    const std::vector<NamedModule>& modules) {
    std::vector<std::size_t> chosen = layers;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const bool beside = std::ranges::none_of(chosen, [&](std::size_t other) {
        return i == other || inside(names[i], names[other]) || inside(names[other], names[i]);
      });
      if (beside && owns_parameters(*by_name.at(names[i]), modules)) chosen.push_back(i);
    }
    std::ranges::sort(chosen);
    return chosen;
  }

  void add_unit(const std::string& name, torch::nn::Module& module) {
    if (unit_of_.contains(&module)) return;
    auto* hookable = dynamic_cast<autograd::Hookable*>(&module);
    autograd::HookPoint* point = hookable == nullptr ? nullptr : &hookable->hook_point();
    unit_of_.emplace(&module, owners_.add_unit({name, &module, point, {}}));
  }

  void visit(const std::string& name, torch::nn::Module& module, std::size_t owner) {
    if (const auto unit = unit_of_.find(&module); unit != unit_of_.end()) owner = unit->second;
    const std::string prefix = name.empty() ? name : name + ".";
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      owners_.add(prefix + item.key(), item.value(), owner);
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      NEAP_CHECK(!item.value().is_meta(), "[shard] expected buffers with memory; found '", prefix, item.key(),
                 "' on the meta device; make it on its device before fully_shard()");
    }
    for (const auto& child : module.named_children()) visit(prefix + child.key(), *child.value(), owner);
  }

  Owners owners_;
  std::unordered_map<torch::nn::Module*, std::size_t> unit_of_;
};

}  // namespace

std::vector<OwnedUnit> assign_parameters(torch::nn::Module& model, const std::vector<std::string>& modules) {
  return Assignment(model, modules).take();
}

std::vector<OwnedUnit> assign_parameters(const std::vector<NamedUnit>& units) {
  Owners owners;
  for (const NamedUnit& unit : units) {
    const std::size_t owner = owners.add_unit({unit.name, nullptr, unit.point, {}});
    for (const auto& [name, tensor] : unit.parameters) owners.add(name, tensor, owner);
  }
  return std::move(owners).take();
}

}  // namespace neap::shard
