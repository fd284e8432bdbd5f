#include "neap/comm/store_world.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "neap/comm/internal/gloo_fabric.h"

namespace neap::comm {

std::unique_ptr<World> connect_at(const c10::intrusive_ptr<c10d::Store>& store, const Launch& launch,
                                  const WorldOptions& options) {
  if (launch.world == 1) return World::connect(launch, options);
  auto world = std::make_unique<World>(internal::make_gloo_fabric(store, launch, options), options);
  world->all();
  return world;
}

}  // namespace neap::comm
