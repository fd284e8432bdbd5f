#include "neap/train/parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <optional>

#include "neap/base/error.h"

namespace neap::train {
namespace {

shard::Stage stage_of(ZeroStage stage) {
  switch (stage) {
    case ZeroStage::kOptimizer:
      return shard::Stage::kOptimizer;
    case ZeroStage::kGradients:
      return shard::Stage::kGradients;
    case ZeroStage::kParameters:
      break;
  }
  return shard::Stage::kParameters;
}

std::optional<c10::ScalarType> other_than_float32(Dtype dtype) {
  return dtype == Dtype::kBfloat16 ? std::optional(at::kBFloat16) : std::nullopt;
}

}  // namespace

comm::Mesh mesh_of(const ParallelSection& parallel, int world, int rank) {
  const int64_t shard = parallel.shard, replicate = parallel.replicate.value_or(-1);
  NEAP_CHECK(shard == -1 || (shard <= world && world % shard == 0),
             "[parallel.shard] expected -1 or a divisor of the number of ranks, which is ", world, "; found ", shard);
  NEAP_CHECK(replicate == -1 || (replicate <= world && world % replicate == 0),
             "[parallel.replicate] expected automatic or a divisor of the number of ranks, which is ", world,
             "; found ", replicate);
  NEAP_CHECK(shard == -1 || replicate == -1 || shard * replicate == world, "[parallel.replicate] expected ",
             world / std::max<int64_t>(shard, 1), " for ", world, " ranks and parallel.shard: ", shard, "; found ",
             replicate, "; leave one of the two out");
  comm::MeshOptions options;
  options.data_parallel_shard = static_cast<int>(shard);
  options.data_parallel_replicate = shard == -1 && replicate == -1 ? 1 : static_cast<int>(replicate);
  return {world, rank, options};
}

shard::Options shard_options(const ParallelSection& parallel, Dtype compute, int world) {
  shard::Options options;
  options.param_dtype = other_than_float32(compute);
  options.reduce_dtype = parallel.reduce_dtype == Dtype::kBfloat16 ? at::kBFloat16 : at::kFloat;
  options.output_dtype = other_than_float32(parallel.output_dtype);
  options.comm_fusion = parallel.comm_fusion;
  options.stage = stage_of(parallel.stage);
  // Each rank's loss carries the weight of its tokens among all of them already, so the sum is the mean.
  options.reduce_op = shard::ReduceOp::kSum;
  options.gradient_factor = parallel.reduce_op == GradientReduction::kSum ? world : 1;
  return options;
}

Exchanged exchange(comm::World& world, const std::vector<at::Tensor>& losses, bool stop) {
  const auto count = static_cast<int64_t>(losses.size());
  const at::Tensor all = at::empty({world.size(), count + 1}, at::kFloat);
  const at::Tensor mine = all.select(0, world.rank());
  mine.narrow(0, 0, count).copy_(at::stack(losses));
  mine.select(0, count).fill_(stop ? 1 : 0);
  world.all().all_gather(all, "losses").wait();

  const auto values = all.accessor<float, 2>();
  float loss = values[0][0];
  for (int64_t micro = 0; micro < count; ++micro) {
    for (int64_t rank = micro == 0 ? 1 : 0; rank < world.size(); ++rank) loss += values[rank][micro];
  }
  Exchanged out{.loss = loss, .stop = false};
  for (int64_t rank = 0; rank < world.size(); ++rank) out.stop = out.stop || values[rank][count] != 0;
  return out;
}

}  // namespace neap::train
