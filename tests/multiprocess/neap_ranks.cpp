// One rank of a world of processes: neap_ranks SCENARIO [TIMEOUT_MS]
//
//   contract  every collective, over the world and over a mesh of two rows
//   sim       every collective over the memory of simulated devices, one a process
//   twice     two worlds, one after the other
//   leave     one collective and the end: rank 0, who serves the store, must not be gone before the others are done
//   loop      all_reduce for ever; says "looping" once it does
//   rows      the same over a mesh of two rows: a shard group, then a replicate group
//   mismatch  rank 1 calls another collective
//   absent    rank 1 connects and never calls; ends when its standard input does
//   throw     rank 1 throws between two collectives
//   bench     times of large collectives
//
// Exit status 0, or 1 with the error on standard error.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>

#include "neap/comm/world.h"
#include "testing/collective_contract.h"
#include "testing/sim_fixture.h"

namespace {

using namespace neap;
using namespace neap::comm;
using Scenario = std::function<void(World&)>;

void contract(World& world) {
  neap::testing::check_collectives(world.all(), c10::kCPU);
  if (world.size() % 2 != 0) return;
  const Mesh mesh(world.size(), world.rank(), {.data_parallel_shard = -1, .data_parallel_replicate = 2});
  const auto groups = world.groups(mesh);
  neap::testing::check_collectives(groups.shard, c10::kCPU);
  neap::testing::check_collectives(groups.replicate, c10::kCPU);
}

void loop(World& world) {
  const at::Tensor tensor = at::ones({1 << 20});
  for (int64_t step = 0;; ++step) {
    world.all().all_reduce(tensor, {.op = ReduceOp::kAverage}, "layers.3").wait();
    if (step == 2) std::cout << "looping" << std::endl;
  }
}

void rows(World& world) {
  const auto groups =
      world.groups({world.size(), world.rank(), {.data_parallel_shard = -1, .data_parallel_replicate = 2}});
  const at::Tensor full = at::ones({1 << 18}), mine = at::zeros({full.numel() / groups.shard.size()});
  for (int64_t step = 0;; ++step) {
    groups.shard.reduce_scatter(mine, full, {.op = ReduceOp::kAverage}, "layers.3").wait();
    groups.replicate.all_reduce(mine, {.op = ReduceOp::kAverage}, "layers.3").wait();
    if (step == 2) std::cout << "looping" << std::endl;
  }
}

void mismatch(World& world) {
  const at::Tensor tensor = at::ones({1000});
  world.all().barrier("in step").wait();
  if (world.rank() == 1) world.all().all_gather(at::ones({8 * world.size()}), "layers.4").wait();
  world.all().all_reduce(tensor, {}, "layers.3").wait();
}

void absent(World& world) {
  world.all().barrier("in step").wait();
  std::string line;
  if (world.rank() == 1) std::getline(std::cin, line);
  world.all().all_reduce(at::ones({1000}), {}, "layers.3").wait();
}

void throw_between(World& world) {
  world.all().barrier("in step").wait();
  if (world.rank() == 1) throw std::runtime_error("out of memory in layers.2");
  world.all().all_reduce(at::ones({1000}), {}, "layers.3").wait();
}

void bench(World& world) {
  at::set_num_threads(1);
  Group& group = world.all();
  const auto median_ms = [&](const std::function<Work()>& start) {
    std::vector<double> times;
    for (int i = 0; i < 15; ++i) {
      group.barrier("in step").wait();
      const auto begin = std::chrono::steady_clock::now();
      start().wait();
      times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  for (const int64_t mib : {0, 1, 64}) {
    const int64_t elements = std::max<int64_t>(mib << 18, world.size());
    const at::Tensor full = at::ones({elements}), mine = at::zeros({elements / world.size()});
    const at::Tensor half = full.to(at::kBFloat16);
    const double gather = median_ms([&] { return group.all_gather(full, "bench"); });
    const double scatter = median_ms([&] { return group.reduce_scatter(mine, full, {}, "bench"); });
    const double low = median_ms([&] { return group.reduce_scatter(mine, half, {}, "bench"); });
    const double reduce = median_ms([&] { return group.all_reduce(full, {}, "bench"); });
    if (world.rank() == 0)
      std::printf(
          "%d ranks, %lld MiB of float32: gather %.2f ms, scatter %.2f, scatter bfloat16 %.2f, all_reduce %.2f\n",
          world.size(), static_cast<long long>(mib), gather, scatter, low, reduce);
  }
}

const std::map<std::string, Scenario> kScenarios{
    {"contract", contract},
    {"sim",
     [](World& world) {
       neap::testing::sim_control();
       neap::testing::check_collectives(world.all(), neap::testing::sim());
       for (const auto& hazard : neap::testing::sim_control().take_hazards()) throw std::runtime_error(hazard);
     }},

    {"loop", loop},
    {"rows", rows},
    {"mismatch", mismatch},
    {"absent", absent},
    {"throw", throw_between},
    {"bench", bench},
    {"leave", [](World& world) { world.all().all_reduce(at::ones({1 << 20}), {}, "layers.3").wait(); }}};

int run(const std::string& scenario, const WorldOptions& options) {
  const Launch launch = Launch::from_environment();
  for (int worlds = scenario == "twice" ? 2 : 1; worlds > 0; --worlds) {
    const auto world = World::connect(launch, options);
    try {
      kScenarios.at(scenario == "twice" ? "leave" : scenario)(*world);
      world->close();
    } catch (const std::exception& error) {
      world->abandon(error.what());
      throw;
    }
  }
  std::cout << "rank " << launch.rank << " of " << launch.world << ", attempt " << launch.restart << ": ok"
            << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: neap_ranks SCENARIO [TIMEOUT_MS]\n";
    return 2;
  }
  try {
    WorldOptions options;
    if (argc > 2) options.timeout = std::chrono::milliseconds(std::stoll(argv[2]));
    return run(argv[1], options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
