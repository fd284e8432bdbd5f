// A model of several ranks, built without any of them ever holding it whole.
//
// The modules are made on the meta device and cut there; then each rank fills its own pieces, one parameter after the
// other. From files it reads its own range of each parameter alone. Random weights it draws in full, as one process
// does, so that they have the same bits, but one parameter at a time and on the host. On the device there are never
// more than the pieces.
#pragma once

#include <memory>

#include "neap/comm/world.h"
#include "neap/models/causal_lm.h"
#include "neap/shard/fully_shard.h"
#include "neap/train/config.h"

namespace neap::train {

// Without memory: every parameter is on the meta device, in float32.
std::shared_ptr<models::CausalLM> model_without_memory(const models::ModelConfig& config);

// Cuts `model`, which model_without_memory() has made, and fills the pieces on `device` from section.path or from
// `seed`, except for adapters (Adapters::fill()). Collective. UserError when the files do not fit the model.
shard::Sharded shard_and_fill(models::CausalLM& model, comm::MeshGroups groups, shard::Options options,
                              c10::Device device, const ModelSection& section, uint64_t seed);

}  // namespace neap::train
