// torch-free
// All ranks of a run and the groups among them.
//
//   auto world = comm::World::connect(comm::Launch::from_environment());
//   const comm::Mesh mesh(world->size(), world->rank(), {.data_parallel_replicate = 2});
//   auto [shard, replicate] = world->groups(mesh);
//   …
//   world->close();
//
// Ranks meet at a c10d TCPStore (rank 0 serves it, or torchrun's agent does) and talk over Gloo. One rank alone needs
// neither, and then every collective is at most a copy. testing/ranks.h has worlds whose ranks are threads.
//
// Failures: see failure.h. A World that is destroyed without close(), say while an exception unwinds, tells the others
// that this rank left, so that they end too.
//
// Groups are made and closed from one thread; they live as long as the World.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "neap/comm/group.h"
#include "neap/comm/launch.h"
#include "neap/comm/mesh.h"

namespace neap::trace {
class Recorder;
}

namespace neap::comm {

namespace internal {
class Fabric;
}  // namespace internal

struct WorldOptions {
  // How long a rank waits for the others: to connect, and in every collective, counted from when the collective can
  // start on this rank. What takes longer on purpose, say rank 0 writing a checkpoint, must fit. Also how long a rank
  // that hangs can hold up the end of a run.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // CUDA alone: reductions add in rank order, as they do everywhere else, rather than in NCCL's. Costs memory as large
  // as the full buffer.
  bool ordered = false;
  // Network interface for Gloo ("eth0"); empty: GLOO_SOCKET_IFNAME, else the one that the host's name resolves to.
  std::string interface;
  // A span for each collective, "all_gather layers.3" on the track "comm/<group>". Must outlive the World.
  trace::Recorder* recorder = nullptr;
  // The recorder's clock, asked by the thread that starts a collective; empty: the host's steady clock. A clock of the
  // device's own does not run for what CPU tensors do, whose collectives are instants then; those over the device's
  // tensors are drawn by the device (neap/base/host_task.h).
  std::function<int64_t()> clock = {};
};

struct MeshGroups {
  Group& shard;
  Group& replicate;
};

class World {
 public:
  // Waits until all ranks are there. UserError or RankFailure after the timeout.
  static std::unique_ptr<World> connect(const Launch& launch, const WorldOptions& options = {});
  // Over a transport of its own, for tests.
  World(std::unique_ptr<internal::Fabric> fabric, const WorldOptions& options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  [[nodiscard]] const WorldOptions& options() const noexcept;

  // The group of all ranks, named "world".
  Group& all();
  // Every member calls it, in the same order relative to its other group() calls; the others need not. Waits for the
  // members. Ascending world ranks, this rank among them. The same ranks again give the same Group; `name` is then
  // ignored, so that a mesh of one row shares the group of the world.
  Group& group(const std::vector<int>& ranks, std::string_view name);
  // This rank's two groups. REQUIRES: mesh.world() == size(), mesh.rank() == rank().
  MeshGroups groups(const Mesh& mesh);

  // Throws the failure that has ended this world, if this rank knows of one. Costs one load: ask before an optimizer
  // step on an asynchronous device, where no wait() of the host would have told.
  void check() const;
  // Tells the other ranks why this one leaves and ends their collectives: "rank 3: out of memory in layers.2".
  void abandon(std::string_view reason) noexcept;
  // The regular end: waits for all ranks, then lets the connections go. Collectives still running are waited for.
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace neap::comm
