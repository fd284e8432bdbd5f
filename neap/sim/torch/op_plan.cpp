#include "neap/sim/torch/op_plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace neap::sim {
namespace {

using Cost = OpPlan::Cost;
using Use = OpPlan::Use;

Cost cost_of(std::string_view name) {
  static const std::unordered_map<std::string_view, Cost> kCosts = {
      {"aten::mm", Cost::kMatMul},
      {"aten::bmm", Cost::kMatMul},
      {"aten::mv", Cost::kDot},
      {"aten::dot", Cost::kDot},
      {"aten::addmm", Cost::kAddMatMul},
      {"aten::baddbmm", Cost::kAddMatMul},
      {"aten::addbmm", Cost::kAddMatMul},
      {"aten::_addmm_activation", Cost::kAddMatMul},
      {"aten::linear", Cost::kLinear},
      {"aten::mkldnn_linear", Cost::kLinear},
      {"aten::linear_backward", Cost::kLinearBackward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", Cost::kAttention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", Cost::kAttentionBackward},
  };
  const auto found = kCosts.find(name);
  return found == kCosts.end() ? Cost::kBytes : found->second;
}

// In place, but nothing of the old contents is read.
bool only_overwrites(std::string_view name) {
  static const std::unordered_set<std::string_view> kNames = {
      "aten::fill_",   "aten::zero_",      "aten::uniform_",     "aten::normal_",
      "aten::random_", "aten::bernoulli_", "aten::exponential_", "aten::_foreach_zero_"};
  return kNames.count(name) != 0;
}

bool is_view(const c10::FunctionSchema& schema) {
  const auto aliases_without_writing = [](const c10::Argument& a) {
    return a.alias_info() && !a.alias_info()->isWrite();
  };
  const auto writes = [](const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); };
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), aliases_without_writing) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), writes);
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

OpPlan make_plan(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OpPlan plan;
  plan.name = schema.name().c_str();
  plan.num_arguments = schema.arguments().size();
  plan.num_returns = schema.returns().size();
  for (std::size_t i = 0; i < plan.num_arguments; ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    // `out=` is written only; the `self` of most in-place operators is read first.
    const bool only_written = argument.is_out() || only_overwrites(schema.name());
    plan.uses.push_back(!written ? Use::kReads : only_written ? Use::kWrites : Use::kUpdates);
    if (is_generator(argument)) plan.generator_argument = static_cast<int>(i);
  }
  plan.has_cpu_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  plan.is_view = is_view(schema);
  plan.takes_cpu_tensors = schema.name().find("index") != std::string::npos;
  plan.waits_for_result = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  plan.cost = cost_of(schema.name());
  return plan;
}

double numel(const c10::IValue& v) { return static_cast<double>(v.toTensor().numel()); }
double size(const c10::IValue& v, int64_t dim) { return static_cast<double>(v.toTensor().size(dim)); }

}  // namespace

const OpPlan& plan_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OpPlan> plans;
  const auto* key = &op.schema();
  const auto found = plans.find(key);
  return found != plans.end() ? found->second : plans.emplace(key, make_plan(op)).first->second;
}

double flops(const OpPlan& plan, const c10::IValue* a) {
  switch (plan.cost) {
    case Cost::kBytes:
      return 0;
    case Cost::kMatMul:  // [b] m k, [b] k n
      return 2 * numel(a[0]) * size(a[1], -1);
    case Cost::kDot:  // [m] k, k
      return 2 * numel(a[0]);
    case Cost::kAddMatMul:
      return 2 * numel(a[1]) * size(a[2], -1);
    case Cost::kLinear:  // … k, n k
      return 2 * numel(a[0]) * size(a[1], 0);
    case Cost::kLinearBackward:  // self, grad_output, weight: two products
      return 4 * numel(a[0]) * size(a[2], 0);
    case Cost::kAttention:  // q·kᵀ and p·v; b h s d
      return 4 * numel(a[0]) * size(a[1], -2);
    case Cost::kAttentionBackward:  // grad, q, k: q·kᵀ again, and four products
      return 10 * numel(a[1]) * size(a[2], -2);
  }
  return 0;
}

}  // namespace neap::sim
