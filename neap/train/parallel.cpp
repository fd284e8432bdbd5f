#include "neap/train/parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "neap/base/error.h"
#include "neap/comm/agreement.h"
#include "neap/train/schema.h"

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

bool is_of_the_host(std::string_view key) {
  return key.starts_with("device.") || key.starts_with("log.") || key.ends_with(".path");
}

// "train.steps=100\n…": every key that the ranks have to agree on.
std::string shared_keys(const RunConfig& config) {
  std::string text;
  for (const Key& key : keys()) {
    if (!is_of_the_host(key.path)) text += key.path + '=' + key.show(config) + '\n';
  }
  return text;
}

// "train.steps is 3 on rank 0 and 5 on ranks 1, 2", or nothing when all have the same.
std::string difference_of(const std::string& key, const std::vector<std::string>& texts) {
  std::map<std::string, std::vector<size_t>> ranks_of;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const size_t at = ('\n' + texts[rank]).find('\n' + key + '=');
    const size_t begin = at == std::string::npos ? texts[rank].size() : at + key.size() + 1;
    ranks_of[texts[rank].substr(begin, texts[rank].find('\n', begin) - begin)].push_back(rank);
  }
  if (ranks_of.size() == 1) return {};
  std::string text = key + " is ";
  for (const auto& [value, ranks] : ranks_of) {
    if (!text.ends_with(" is ")) text += " and ";
    text += value + (ranks.size() == 1 ? " on rank " : " on ranks ") + std::to_string(ranks.front());
    constexpr size_t kShown = 8;
    for (size_t i = 1; i < std::min(ranks.size(), kShown); ++i) text += ", " + std::to_string(ranks[i]);
    if (ranks.size() > kShown) text += ", …";
  }
  return text;
}

}  // namespace

void check_same_config(comm::World& world, const RunConfig& config) {
  if (world.size() == 1) return;
  const std::string mine = shared_keys(config);
  // Few bytes as a rule; the texts only when something differs.
  const at::Tensor hashes = at::empty({world.size()}, at::kLong);
  auto* const hash = hashes.mutable_data_ptr<int64_t>();
  hash[world.rank()] = static_cast<int64_t>(std::hash<std::string>{}(mine));
  world.all().all_gather(hashes, "configuration").wait();
  if (std::all_of(hash, hash + world.size(), [&](int64_t other) { return other == hash[0]; })) return;
  const std::vector<std::string> texts = comm::exchange_texts(&world, mine, "configuration");
  std::string differences;
  for (const Key& key : keys()) {
    if (is_of_the_host(key.path)) continue;
    const std::string difference = difference_of(key.path, texts);
    if (!difference.empty()) differences += (differences.empty() ? "" : "; ") + difference;
  }
  NEAP_CHECK(differences.empty(), "[parallel] expected every rank to be told the same; found that ", differences,
             "; start all ranks with the same run file and options");
}

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

Exchanged exchange(comm::World& world, const std::vector<std::vector<at::Tensor>>& losses, bool stop) {
  const auto count = static_cast<int64_t>(losses.front().size());
  const int64_t flag = count * static_cast<int64_t>(losses.size());
  const at::Tensor all = at::empty({world.size(), flag + 1}, at::kFloat);
  const at::Tensor mine = all.select(0, world.rank());
  for (size_t kind = 0; kind < losses.size(); ++kind) {
    mine.narrow(0, static_cast<int64_t>(kind) * count, count).copy_(at::stack(losses[kind]));
  }
  mine.select(0, flag).fill_(stop ? 1 : 0);
  world.all().all_gather(all, "losses").wait();

  const auto values = all.accessor<float, 2>();
  Exchanged out;
  for (int64_t first = 0; first < flag; first += count) {
    float loss = values[0][first];
    for (int64_t micro = 0; micro < count; ++micro) {
      for (int64_t rank = micro == 0 ? 1 : 0; rank < world.size(); ++rank) loss += values[rank][first + micro];
    }
    out.losses.push_back(loss);
  }
  for (int64_t rank = 0; rank < world.size(); ++rank) out.stop = out.stop || values[rank][flag] != 0;
  return out;
}

}  // namespace neap::train
