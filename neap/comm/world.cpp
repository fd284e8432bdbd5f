#include "neap/comm/world.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "neap/base/error.h"
#include "neap/comm/internal/gloo_fabric.h"
#include "neap/comm/internal/group_core.h"
#include "neap/comm/internal/world_core.h"

namespace neap::comm {
namespace {

using internal::FailureKind;

// One rank has nobody to reach.
class NoFabric final : public internal::Fabric {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::unique_ptr<internal::Transport> connect(const std::string& name, const std::vector<int>& /*ranks*/) override {
    NEAP_ASSERT(false, "one rank connects to others for ", name);
  }
  std::string publish_failure(const std::string& text) noexcept override { return text; }
};

}  // namespace

struct World::State {
  std::shared_ptr<internal::WorldCore> core;
  std::map<std::vector<int>, std::unique_ptr<Group>> groups;
  bool closed = false;
};

std::unique_ptr<World> World::connect(const Launch& launch, const WorldOptions& options) {
  std::unique_ptr<internal::Fabric> fabric;
  if (launch.world == 1) {
    fabric = std::make_unique<NoFabric>();
  } else {
    fabric = internal::make_gloo_fabric(launch, options);
  }
  auto world = std::make_unique<World>(std::move(fabric), options);
  world->all();
  return world;
}

World::World(std::unique_ptr<internal::Fabric> fabric, const WorldOptions& options)
    : state_(std::make_unique<State>()) {
  NEAP_CHECK(options.timeout > std::chrono::milliseconds::zero(), "[comm.timeout] expected a time above zero; found ",
             options.timeout.count(), " ms");
  state_->core = std::make_shared<internal::WorldCore>(std::move(fabric), options);
}

World::~World() {
  if (!state_->closed && size() > 1) abandon("it ended without closing its world, perhaps with an error");
}

int World::rank() const noexcept { return state_->core->fabric().rank(); }
int World::size() const noexcept { return state_->core->fabric().size(); }
const WorldOptions& World::options() const noexcept { return state_->core->options(); }

Group& World::all() {
  std::vector<int> ranks(static_cast<size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(ranks, "world");
}

Group& World::group(const std::vector<int>& ranks, std::string_view name) {
  NEAP_CHECK(!state_->closed, "[comm] expected an open world to make group '", name, "' in; found one that is closed");
  const auto known = state_->groups.find(ranks);
  if (known != state_->groups.end()) return *known->second;
  const bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  NEAP_CHECK(!ranks.empty() && ascending && ranks.front() >= 0 && ranks.back() < size() &&
                 std::binary_search(ranks.begin(), ranks.end(), rank()),
             "[comm] group '", name, "' expected ascending ranks below ", size(), " with rank ", rank(),
             " among them; found ", ranks.size(),
             ranks.empty() ? "" : neap::internal::concat(" from ", ranks.front(), " to ", ranks.back()));
  check();
  auto& core = state_->core;
  try {
    auto made = std::make_unique<internal::GroupCore>(core, std::string(name), ranks);
    return *state_->groups.emplace(ranks, std::make_unique<Group>(std::move(made))).first->second;
  } catch (const internal::LinkLost& lost) {
    const std::string place =
        neap::internal::concat("rank ", rank(), ", connecting ", ranks.size(), " ranks for group '", name, "'");
    const std::string text = place + ": " + lost.what();
    core->fail(FailureKind::kRank, text);
    std::rethrow_exception(core->failure(place, FailureKind::kRank, text));
  }
}

MeshGroups World::groups(const Mesh& mesh) {
  NEAP_ASSERT(mesh.world() == size() && mesh.rank() == rank(), "a mesh of rank ", mesh.rank(), " of ", mesh.world(),
              " on rank ", rank(), " of ", size());
  Group& shard = group(mesh.shard_ranks(), mesh.shard_name());
  return {shard, group(mesh.replicate_ranks(), mesh.replicate_name())};
}

void World::check() const {
  const auto& core = state_->core;
  if (core->failed()) std::rethrow_exception(core->failure("rank " + std::to_string(rank()), FailureKind::kRank, ""));
}

void World::abandon(std::string_view reason) noexcept {
  try {
    state_->core->fail(FailureKind::kRank, neap::internal::concat("rank ", rank(), " left: ", reason));
  } catch (const std::bad_alloc&) {
    state_->core->fail(FailureKind::kRank, "a rank ran out of memory");
  }
}

void World::close() {
  if (state_->closed) return;
  for (const auto& [ranks, group] : state_->groups) group->wait_idle();
  check();
  if (size() > 1) all().barrier("close").wait();
  state_->closed = true;
  state_->groups.clear();
}

}  // namespace neap::comm
