// Questions about the backward pass that is running on this thread.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

namespace neap::autograd {

// The number of the backward pass that runs on this thread, kNoBackward outside of any.
inline constexpr int kNoBackward = -1;
inline int current_backward() { return torch::autograd::get_current_graph_task_id(); }

// This pass executes the node; false for what `backward(inputs)` prunes and for what its roots do not reach.
// REQUIRES: inside a backward pass.
inline bool runs_in_current_pass(torch::autograd::Node* node) {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info != nullptr && !exec_info->empty()) {
    const auto info = exec_info->find(node);
    return info != exec_info->end() && info->second.needed_;
  }
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes == nullptr || nodes->count(node) != 0;
}

}  // namespace neap::autograd
