// How the graph owns its nodes: std::shared_ptr up to torch 2.12, c10::intrusive_ptr from 2.13 on.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <type_traits>
#include <utility>

namespace neap::autograd {

using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge&>().function)>;

}  // namespace neap::autograd
