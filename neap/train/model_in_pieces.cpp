#include "neap/train/model_in_pieces.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "neap/models/hugging_face.h"
#include "neap/models/lora.h"

namespace neap::train {
namespace {

void fill_from_files(const models::HfWeights& weights, const std::vector<shard::Shard>& shards) {
  for (const shard::Shard& shard : shards) {
    if (!models::is_lora_parameter(shard.name)) weights.read(shard.name, shard.begin, shard.data);
  }
}

void fill_at_random(const models::ModelConfig& config, uint64_t seed, const std::vector<shard::Shard>& shards) {
  std::map<std::string, const shard::Shard*> by_name;
  for (const shard::Shard& shard : shards) by_name.emplace(shard.name, &shard);
  // A cut model no longer shows the shapes that are drawn.
  const auto whole = model_without_memory(config);
  whole->draw_weights(seed, [&](const std::string& name, const at::Tensor& value) {
    const shard::Shard& shard = *by_name.at(name);
    shard.data.copy_(value.view(-1).narrow(0, shard.begin, shard.end - shard.begin));
  });
}

}  // namespace

std::shared_ptr<models::CausalLM> model_without_memory(const models::ModelConfig& config) {
  return std::make_shared<models::CausalLM>(config, at::TensorOptions().device(at::kMeta).dtype(at::kFloat));
}

shard::Sharded shard_and_fill(models::CausalLM& model, comm::MeshGroups groups, shard::Options options,
                              c10::Device device, const ModelSection& section, uint64_t seed) {
  // Before anything is allocated: the files are what may be wrong.
  std::optional<models::HfWeights> weights;
  if (section.init == Init::kPretrained) weights.emplace(model, section.path);
  // As tensors on it name it: the CPU without an index.
  const c10::Device placed = at::empty({0}, at::TensorOptions().device(device)).device();
  options.device = placed;
  model.place_buffers(placed);  // whole on every rank
  shard::Sharded sharded = shard::fully_shard(model, groups, std::move(options));
  const at::NoGradGuard no_grad;
  const std::vector<shard::Shard> shards = sharded.shards();
  if (weights) {
    if (groups.shard.rank() == 0 && groups.replicate.rank() == 0) weights->warn_of_what_is_left_out();
    fill_from_files(*weights, shards);
    for (const auto& buffer : model.named_buffers()) weights->read(buffer.key(), 0, buffer.value().view({-1}));
  } else {
    fill_at_random(model.config(), seed, shards);
  }
  return sharded;
}

}  // namespace neap::train
