// A world of ranks that something else has brought together, say torch.distributed in a Python program: they meet at
// the c10d store that they have already. What they send each other goes over connections of the world's own, so that it
// gets in nobody's way.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "neap/comm/launch.h"
#include "neap/comm/world.h"

namespace c10d {
class Store;
}

namespace neap::comm {

// Of `launch` the ranks count, and whether the launcher serves the store. The store has a prefix that no other world
// has, the same on all ranks; it is cloned, so that nobody who waits at it keeps the world waiting. Waits until all
// ranks are there. RankFailure after the timeout.
std::unique_ptr<World> connect_at(const c10::intrusive_ptr<c10d::Store>& store, const Launch& launch,
                                  const WorldOptions& options = {});

}  // namespace neap::comm
