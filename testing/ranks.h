// Ranks as threads of one process, for tests of what several ranks do together.
//
//   run_ranks(4, [](comm::World& world) { … });
//
// The threads talk through memory (neap/comm/internal/local_fabric.h) under the same groups, headers and reductions as
// over a network. An exception of one rank ends the others' collectives; when all threads have ended, it is thrown
// again with the rank's number in front. Failed gtest expectations of any thread count for the test.
//
// A rank that uses `sim` takes a device of its own, sim(world.rank()), see use_sim_devices(). Ranks share what is
// global to a process, such as generators.
#pragma once

#include <functional>

#include "neap/comm/world.h"

namespace neap::testing {

struct RanksOptions {
  comm::WorldOptions world{
      .timeout = std::chrono::seconds(60), .ordered = false, .interface = {}, .recorder = nullptr, .clock = {}};
};

// Returns when every rank has; world.close() is called where the function returned.
void run_ranks(int ranks, const std::function<void(comm::World&)>& body, const RanksOptions& options = {});

}  // namespace neap::testing
