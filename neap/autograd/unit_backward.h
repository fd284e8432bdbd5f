// Internal to hook_point.cpp: finds a unit's part of the autograd graph and turns what happens there into hook events.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/autograd/node_ptr.h"

namespace neap::autograd::internal {

// What tells the nodes of a unit from those that existed before.
class UnitBoundary {
 public:
  // Nullopt without grad mode: there will be no backward.
  static std::optional<UnitBoundary> before_forward(at::ArrayRef<at::Tensor> inputs);

  // The node was created between before_forward() and now. Parameters' gradient accumulators are never inside.
  bool inside(const torch::autograd::Node& node) const;

 private:
  UnitBoundary() = default;

  // Numbers count up per thread. A node that came from another thread may carry a higher one, hence the inputs' nodes.
  uint64_t first_sequence_nr_ = 0;
  std::vector<NodePtr> input_nodes_;
};

// Arranges the backward events of this call. Keeps no tensor alive, and hooks and unit only as long as they are
// attached.
void watch_backward(const UnitCall& call, const AttachmentList& hooks, const UnitBoundary& boundary,
                    const std::vector<at::Tensor>& outputs);

}  // namespace neap::autograd::internal
