// Ranks that are processes: they meet at a c10d TCPStore and send over c10d's ProcessGroupGloo.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "neap/comm/internal/fabric.h"
#include "neap/comm/launch.h"
#include "neap/comm/world.h"

namespace c10d {
class Store;
}

namespace neap::comm::internal {

// From here on the process ignores SIGPIPE, unless it has a handler of its own: ranks that die close connections.
// Waits for the store. RankFailure when it does not answer in time. REQUIRES: launch.world > 1
std::unique_ptr<Fabric> make_gloo_fabric(const Launch& launch, const WorldOptions& options);
// At a store that is there, with keys of this world's own. REQUIRES: launch.world > 1
std::unique_ptr<Fabric> make_gloo_fabric(const c10::intrusive_ptr<c10d::Store>& store, const Launch& launch,
                                         const WorldOptions& options);

}  // namespace neap::comm::internal
