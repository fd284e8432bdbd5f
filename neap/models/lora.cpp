#include "neap/models/lora.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>

#include "neap/autograd/unit_selection.h"
#include "neap/base/error.h"
#include "neap/models/layers.h"
#include "neap/models/mtp_layer.h"

namespace neap::models {
namespace {

class Lora : public LinearAddition {
 public:
  Lora(std::shared_ptr<Linear> a, std::shared_ptr<Linear> b, const LoraOptions& options)
      : a_(std::move(a)), b_(std::move(b)), scale_(options.scale()), dropout_(options.dropout) {}

  at::Tensor add_to(const at::Tensor& y, const at::Tensor& x) const override {
    const at::Tensor input = dropout_ > 0 && a_->is_training() ? at::dropout(x, dropout_, /*train=*/true) : x;
    return at::add(y, b_->forward(a_->forward(input)), scale_);
  }

 private:
  std::shared_ptr<Linear> a_, b_;
  double scale_;
  double dropout_;
};

using NamedLinears = std::vector<std::pair<std::string, std::shared_ptr<Linear>>>;

constexpr std::string_view kOutputHead = "lm_head";

// "model.layers.61." of each layer that predicts further tokens.
std::vector<std::string> mtp_prefixes(const torch::nn::Module& model) {
  std::vector<std::string> prefixes;
  for (const auto& item : model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    if (dynamic_cast<const MtpLayer*>(item.value().get()) != nullptr) prefixes.push_back(item.key() + ".");
  }
  return prefixes;
}

NamedLinears linears_of(const torch::nn::Module& model) {
  NamedLinears found;
  for (const auto& item : model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    auto linear = std::dynamic_pointer_cast<Linear>(item.value());
    if (linear == nullptr || item.key() == kOutputHead) continue;
    NEAP_CHECK(linear->addition() == nullptr, "[lora] expected a model without adapters; found one at ", item.key());
    found.emplace_back(item.key(), std::move(linear));
  }
  return found;
}

std::string_view last_part_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// Indices into `names.units`, which are the linear layers.
std::vector<std::size_t> matching_linears(const std::string& wanted, const autograd::ModelNames& names) {
  const bool pattern = wanted.find_first_of(".{*?[") != std::string::npos;
  if (pattern) return autograd::select_units(names, {wanted}, "lora");
  std::vector<std::size_t> found;
  std::set<std::string> known;
  for (std::size_t i = 0; i < names.units.size(); ++i) {
    const std::string_view last = last_part_of(names.units[i]);
    known.emplace(last);
    if (wanted == "all-linear" || last == wanted) found.push_back(i);
  }
  std::string list;
  for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
  NEAP_CHECK(!found.empty(), "[lora.modules] expected names of linear layers of the model: ", list,
             ", or a pattern; found ", wanted,
             wanted == kOutputHead ? "; the output head takes no adapter, as the loss uses its weight directly" : "");
  return found;
}

NamedLinears select_linears(const torch::nn::Module& model, const std::vector<std::string>& modules) {
  NEAP_CHECK(!modules.empty(), "[lora.modules] expected names of linear layers; found none");
  NamedLinears linears = linears_of(model);
  autograd::ModelNames names{.modules = {""}, .units = {}};
  for (const auto& item : model.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    names.modules.push_back(item.key());
  for (const auto& [name, linear] : linears) names.units.push_back(name);
  const std::vector<std::string> further = mtp_prefixes(model);
  std::set<std::size_t> chosen;
  for (const std::string& wanted : modules) {
    bool any = false;
    for (const std::size_t index : matching_linears(wanted, names)) {
      const auto of = std::ranges::find_if(
          further, [&](const std::string& prefix) { return names.units[index].starts_with(prefix); });
      if (of != further.end() && !wanted.starts_with(*of)) continue;
      chosen.insert(index);
      any = true;
    }
    NEAP_CHECK(any, "[lora.modules] ", wanted,
               " is only in layers that predict further tokens, which take adapters where they are named by number; "
               "expected such as ",
               further.front(), wanted.substr(wanted.rfind('.') + 1));
  }
  NamedLinears selected;
  for (const std::size_t index : chosen) selected.push_back(std::move(linears[index]));
  return selected;
}

}  // namespace

NamedTensors draw_lora(const torch::nn::Module& model, const LoraOptions& options, uint64_t seed) {
  check(options);
  const at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  NamedTensors values;
  for (const auto& [name, sizes] : lora_shapes(model, options)) {
    const at::Tensor& value = values.emplace_back(name, at::zeros(sizes, at::kFloat)).second;
    if (!name.ends_with(".lora_A.weight")) continue;
    // Kaiming's uniform distribution with a = sqrt(5), as PEFT and torch's own Linear.
    const double bound = 1 / std::sqrt(static_cast<double>(sizes[1]));
    value.uniform_(-bound, bound, generator);
  }
  return values;
}

std::vector<std::string> add_lora(torch::nn::Module& model, const LoraOptions& options, uint64_t seed) {
  return add_lora(model, options, draw_lora(model, options, seed));
}

std::vector<std::string> add_lora(torch::nn::Module& model, const LoraOptions& options, const NamedTensors& values) {
  check(options);
  const NamedLinears linears = select_linears(model, options.modules);
  for (at::Tensor& parameter : model.parameters()) parameter.requires_grad_(false);

  std::vector<std::string> names;
  for (const auto& [name, linear] : linears) {
    const at::Tensor& weight = linear->weight;
    auto a = std::make_shared<Linear>(weight.size(1), options.rank, /*with_bias=*/false, weight.options());
    auto b = std::make_shared<Linear>(options.rank, weight.size(0), /*with_bias=*/false, weight.options());
    linear->set_addition(std::make_shared<Lora>(a, b, options), {{"lora_A", a}, {"lora_B", b}});
    names.push_back(name);
  }
  const at::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> by_name(values.begin(), values.end());
  for (const auto& [name, parameter] : lora_state(model)) {
    if (!parameter.is_meta()) parameter.copy_(by_name.at(name));
  }
  return names;
}

std::vector<LoraShape> lora_shapes(const torch::nn::Module& model, const LoraOptions& options) {
  std::vector<LoraShape> shapes;
  for (const auto& [name, linear] : select_linears(model, options.modules)) {
    shapes.emplace_back(name + ".lora_A.weight", std::vector<int64_t>{options.rank, linear->weight.size(1)});
    shapes.emplace_back(name + ".lora_B.weight", std::vector<int64_t>{linear->weight.size(0), options.rank});
  }
  return shapes;
}

bool is_lora_parameter(std::string_view name) {
  return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight");
}

NamedTensors lora_state(const torch::nn::Module& model) {
  NamedTensors state;
  for (const auto& item : model.named_parameters()) {
    if (is_lora_parameter(item.key())) state.emplace_back(item.key(), item.value());
  }
  return state;
}

}  // namespace neap::models
