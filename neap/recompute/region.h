// The primitive: a piece of forward that keeps its inputs alone and is run again when backward needs the rest.
//
//   auto out = recompute::region([layer](at::ArrayRef<at::Tensor> in) -> recompute::TensorList {
//     return {layer->forward(in[0], in[1])};
//   }, {x, mask});
//
// Non-reentrant: the region's operators are in the autograd graph as ever; placeholders stand where their saved tensors
// would be. The first placeholder that a backward pass unpacks has the function run again, on detached inputs, and what
// that run saves is handed to the others. So everything works that works without: retain_graph, several backward
// passes, backward(inputs), regions within regions, any thread. With create_graph the graph of the gradients holds the
// recomputed tensors themselves: right, but no memory is saved for them.
//
// The inputs are saved through the scope that surrounds the region (offload, say); what the region itself saves reaches
// that scope neither in forward nor when it is run again.
//
// What the second run has from the first: generators (CPU, and those of the devices of the inputs), autocast, current
// streams and grad mode. What it must have by itself: the same values in everything else that the function reads. The
// tensors it saves are checked for number, shape, dtype and device, and each is checked to be unchanged since forward
// as eager autograd does. A function that changes its inputs in place, or state that it reads (running statistics),
// cannot be run twice; the former is noticed, the latter is what Options::debug is for.
//
// A region is owned by its placeholders: when the graph goes, it goes with all it holds. Between passes it holds the
// inputs, as saved, and a few words per saved tensor. Thread-safe as autograd graphs are; several threads may run
// backward over one region at once, each pass runs it again for itself. Generators are global: a thread that draws
// from one while another thread runs a region again gets numbers of that region.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <string>
#include <vector>

#include "neap/recompute/options.h"

namespace neap::recompute {

using TensorList = std::vector<at::Tensor>;

// Kept until the graph goes: capture by value, or what lives longer than the graph. A tensor that is captured rather
// than an input stays in memory as it is, outside of the scope that surrounds the region; right for parameters.
using Function = std::function<TensorList(at::ArrayRef<at::Tensor> inputs)>;

struct RegionOptions : Options {
  std::string name = "region";  // in messages
  // Devices from whose generators the function draws, beside the CPU and those of its inputs.
  std::vector<c10::Device> devices = {};
};

// fn(inputs), to be run again in backward. Without grad mode it is a plain call. Undefined inputs are handed on.
// UserErrors: in backward, if the second run saves other tensors than the first; in forward, if with preserve_rng the
// region saves a tensor of a device whose generator was not recorded.
TensorList region(Function fn, at::ArrayRef<at::Tensor> inputs, const RegionOptions& options = {});

}  // namespace neap::recompute
