// What the fallback must know about an operator before it can run it: worked out once per thread and operator from
// the schema, so that a call costs one hash lookup.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

namespace neap::sim {

struct OpPlan {
  // How the clock counts floating-point operations; the rest is counted by the bytes that it moves.
  enum class Cost : uint8_t {
    kBytes,
    kMatMul,
    kAddMatMul,
    kDot,
    kLinear,
    kLinearBackward,
    kAttention,
    kAttentionBackward
  };
  enum class Use : uint8_t { kReads, kWrites, kUpdates };

  const char* name = nullptr;  // e.g. "aten::mm", owned by the schema
  std::size_t num_arguments = 0;
  std::size_t num_returns = 0;
  int generator_argument = -1;
  bool has_cpu_kernel = false;
  bool is_view = false;            // changes metadata only: no kernel runs, nothing is read
  bool takes_cpu_tensors = false;  // an index list may lie on the CPU, as on CUDA
  bool waits_for_result = false;   // the host must read the result to know its shape (nonzero, masked_select …)
  Cost cost = Cost::kBytes;
  std::vector<Use> uses;  // one per argument
};

const OpPlan& plan_of(const c10::OperatorHandle& op);

// Floating-point operations of a call with these arguments; 0 for operators that memory bandwidth bounds.
double flops(const OpPlan& plan, const c10::IValue* arguments);

}  // namespace neap::sim
