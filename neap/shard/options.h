// How a model is sharded.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "neap/base/bytes.h"

namespace neap::shard {

// What is kept in pieces (ZeRO, Rajbhandari et al. 2020). Between steps every stage holds pieces of parameters alone;
// they differ in how long full parameters and full gradients live within a step.
enum class Stage : uint8_t {
  kOptimizer = 1,   // full parameters from forward to the end of backward, full gradients until its end
  kGradients = 2,   // full parameters as above; gradients are reduced and let go unit by unit
  kParameters = 3,  // full parameters only while their unit runs, too
};

// "optim", "optim_grads", "optim_grads_params", as MindFormers names them. UserError on anything else.
Stage parse_stage(std::string_view name);
const char* to_string(Stage stage);

enum class ReduceOp : uint8_t { kAverage, kSum };

struct Options {
  // Patterns over module names (neap/autograd/unit_selection.h); empty: the model's own list of layers, and hook points
  // beside it whose parameters are theirs alone, such as an embedding and an output head. A parameter belongs to the
  // innermost unit around it; what no unit holds makes up the root unit.
  std::vector<std::string> modules;

  bool comm_fusion = true;  // one gather and one scatter per group; else one per parameter
  Bytes bucket_limit;       // of a group's full parameters; 0: none
  Stage stage = Stage::kParameters;
  bool prefetch = true;  // gather the next unit while this one computes, reduce the last one's gradients meanwhile

  // Of the gradients over all ranks; then multiplied by the factor.
  ReduceOp reduce_op = ReduceOp::kAverage;
  double gradient_factor = 1;

  // Shards stay in the parameter's own dtype, which makes them the masters of the optimizer; these are what full
  // parameters and full gradients are held and sent in. Only for floating-point parameters. Default: no change.
  std::optional<c10::ScalarType> param_dtype;
  std::optional<c10::ScalarType> reduce_dtype;  // default: param_dtype
  std::optional<c10::ScalarType> output_dtype;  // of what Sharded::run() returns

  // How many elements of a parameter must stay together on one rank: a row, a quantisation block. Empty: cut anywhere.
  std::function<int64_t(const std::string& name, at::IntArrayRef sizes)> block_of;

  // Parameters on the meta device get their shards here, filled by `initialize`, which writes the whole parameter on
  // every rank (the same values); without it they are zero until something is loaded. One group at a time.
  std::optional<c10::Device> device;
  std::function<void(const std::string& name, const at::Tensor& full)> initialize;
};

// What sharding holds on this rank now, and what it has done since it was made.
struct Usage {
  Bytes shards;     // the pieces of the parameters
  Bytes unsharded;  // full parameters
  Bytes gradients;  // full gradients
  Bytes reduced;    // pieces of gradients
  Bytes minimum;    // of `shards`: what an even cut of the padded groups needs; all else is on top of it
  Bytes padding;    // within `minimum`, bytes of no parameter
  Bytes copied;     // by sharding itself, beside the collectives: casts, and gradients that did not come in place
  int64_t gathers = 0;
  int64_t scatters = 0;
  int64_t live_units = 0;  // that are unsharded or on their way, without the root
  int64_t live_units_peak = 0;
};

}  // namespace neap::shard
