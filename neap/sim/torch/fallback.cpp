#include "neap/sim/torch/fallback.h"

#include <ATen/core/List.h>
#include <c10/core/DeviceGuard.h>

#include "neap/sim/torch/cpu_call.h"
#include "neap/sim/torch/generator.h"
#include "neap/sim/torch/op_plan.h"

namespace neap::sim {
namespace {

using at::Tensor;
using c10::IValue;

// Replaces what the argument holds of the device by its CPU counterpart.
void to_cpu(CpuCall& call, IValue& argument, OpPlan::Use use) {
  if (argument.isTensor()) {
    argument = call.alias(argument.toTensor(), use);
  } else if (argument.isTensorList()) {
    c10::List<Tensor> aliases;
    const auto tensors = argument.toTensorList();
    aliases.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) aliases.push_back(call.alias(tensors.get(i), use));
    argument = std::move(aliases);
  } else if (argument.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> aliases;
    const auto tensors = argument.toOptionalTensorList();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::optional<Tensor> t = tensors.get(i);
      aliases.push_back(t ? std::optional(call.alias(*t, use)) : t);
    }
    argument = std::move(aliases);
  } else if (argument.isDevice() && argument.toDevice().type() == kSim) {
    call.set_device(device_index(argument.toDevice()));
    argument = c10::Device(c10::kCPU);
  }
}

// An operator without a generator draws from the device's, as on CUDA.
void use_cpu_generator(IValue& argument, int device) {
  if (argument.isNone()) {
    argument = cpu_twin(default_generator(device));
  } else if (argument.toGenerator().device().type() == kSim) {
    argument = cpu_twin(argument.toGenerator());
  }
}

void note_result(CpuCall& call, const IValue& value) {
  if (value.isTensor()) {
    call.produced(value.toTensor());
  } else if (value.isTensorList()) {
    const auto tensors = value.toTensorList();
    for (std::size_t i = 0; i < tensors.size(); ++i) call.produced(tensors.get(i));
  }
}

void to_sim(CpuCall& call, IValue& value) {
  if (value.isTensor()) {
    value = call.result(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> results;
    const auto tensors = value.toTensorList();
    for (std::size_t i = 0; i < tensors.size(); ++i) results.push_back(call.result(tensors.get(i)));
    value = std::move(results);
  }
}

// Integer indices give a shape that is known without reading them; only a mask has to be counted.
bool waits_for_result(const OpPlan& plan, const IValue* arguments) {
  if (!plan.waits_for_result) return false;
  if (plan.num_arguments < 2 || !arguments[1].isOptionalTensorList()) return true;
  const auto indices = arguments[1].toOptionalTensorList();
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::optional<Tensor> index = indices.get(i);
    if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
      return true;
  }
  return false;
}

}  // namespace

void cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OpPlan& plan = plan_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(plan.has_cpu_kernel, plan.name,
                              ": sim runs the CPU's kernels, and the CPU has none for this operator");
  IValue* arguments = stack->data() + (stack->size() - plan.num_arguments);
  const double cost = flops(plan, arguments);
  const bool host_waits = waits_for_result(plan, arguments);

  CpuCall call(plan.name, plan.takes_cpu_tensors);
  for (std::size_t i = 0; i < plan.num_arguments; ++i) to_cpu(call, arguments[i], plan.uses[i]);
  call.set_device(Engine::current_device());
  if (plan.generator_argument >= 0) use_cpu_generator(arguments[plan.generator_argument], call.device());

  // Memory that the kernel allocates for a growing `out=` belongs to the device of the call.
  const c10::DeviceGuard guard(sim_device(call.device()));
  if (!plan.is_view) call.begin();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  IValue* results = stack->data() + (stack->size() - plan.num_returns);
  if (!plan.is_view) {
    for (std::size_t i = 0; i < plan.num_returns; ++i) note_result(call, results[i]);
    call.finish(cost);
  }
  if (host_waits) call.synchronize();
  for (std::size_t i = 0; i < plan.num_returns; ++i) to_sim(call, results[i]);
}

}  // namespace neap::sim
