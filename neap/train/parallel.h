// What a run of several ranks has beside that of one: how they lie, how the model is cut, what they tell each other.
//
// The batches of a step go round the ranks: rank r of n has the micro-batches r, n + r, 2n + r, … of those that one
// process with n times the accumulation would run. Losses and gradients are divided by the tokens of all ranks and
// added in rank order. With one micro-batch a rank this is that process's own order, and every sum has its bits; with
// more, gradients add up over ranks first and over micro-batches then, and agree within rounding. The gradient norm
// adds pieces up in float64, one process whole gradients in float32: it agrees within rounding, and so does what is
// clipped by it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "neap/comm/mesh.h"
#include "neap/comm/world.h"
#include "neap/shard/options.h"
#include "neap/train/config.h"

namespace neap::train {

struct Ranks {
  comm::World& world;
  comm::Mesh mesh;
};

// UserError when shard × replicate is not the number of ranks.
comm::Mesh mesh_of(const ParallelSection& parallel, int world, int rank);

// For losses that are divided by the tokens of all ranks. `compute`: the dtype of forward and backward, over float32
// pieces.
shard::Options shard_options(const ParallelSection& parallel, Dtype compute, int world);

// UserError on every rank, naming keys and values, when the ranks were told different things. Paths, the device and the
// log are each rank's own: hosts may differ. Collective.
void check_same_config(comm::World& world, const RunConfig& config);

struct Exchanged {
  std::vector<double> losses;  // of all ranks, float32: of each kind, added up in the order of the micro-batches
  bool stop = false;           // some rank wants to stop
};

// What the ranks have to agree on in a step. `losses`: of each kind float32 scalars, one for each of this rank's
// micro-batches. Collective; waits for the device and for the others.
Exchanged exchange(comm::World& world, const std::vector<std::vector<at::Tensor>>& losses, bool stop);

}  // namespace neap::train
