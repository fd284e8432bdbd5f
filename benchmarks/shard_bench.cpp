// What sharding costs.
//
//   shard_bench engine       time per unit and step at 10, 100, 1000 and 10,000 units (or others), on one rank:
//                            everything but the collectives, beyond the same model without sharding
//   shard_bench arithmetic   what a rank of a large world computes of its mesh and of a layer's layout
//   shard_bench step …       one rank of what fsdp2_step.py measures
#include <ATen/ops/ones.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/figure.h"
#include "neap/autograd/hook_point.h"
#include "neap/comm/mesh.h"
#include "neap/shard/flat_layout.h"
#include "neap/shard/fully_shard.h"

namespace neap::bench {
namespace {

// Of this thread on a core: on one rank nothing else works, and what other processes do does not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// ---- engine

class Scale : public torch::nn::Module, public autograd::Hookable {
 public:
  Scale() : weight_(register_parameter("weight", at::ones({8}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] { return x * weight_; });
  }

 private:
  at::Tensor weight_;
};

class Chain : public torch::nn::Module {
 public:
  explicit Chain(int64_t units) {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < units; ++i) {
      units_.push_back(list->register_module(std::to_string(i), std::make_shared<Scale>()));
    }
  }
  at::Tensor forward() {
    at::Tensor x = at::ones({8});
    for (const auto& unit : units_) x = unit->forward(x);
    return x.sum();
  }

 private:
  std::vector<std::shared_ptr<Scale>> units_;
};

double seconds_per_step(Chain& chain, shard::Sharded* sharded) {
  std::vector<double> times;
  for (int step = 0; step < 25; ++step) {
    const double begin = cpu_seconds();
    (sharded != nullptr ? sharded->run([&] { return chain.forward(); }) : chain.forward()).backward();
    times.push_back(cpu_seconds() - begin);
    for (const at::Tensor& p : chain.parameters()) p.mutable_grad().reset();
  }
  return median(times);
}

// Linear in the number of units. Beyond some hundreds of them, what a step touches leaves the core's own cache, and the
// model's cost without sharding rises alike; so the growth is told from there on, where a scan over all units would
// show as a factor of ten.
int engine(std::vector<int64_t> sizes) {
  if (sizes.empty()) sizes = {10, 100, 1000, 10'000};
  const auto world = comm::World::connect(comm::Launch{});
  std::map<int64_t, double> by_size;
  for (const int64_t units : sizes) {
    Chain chain(units);
    const double plain = seconds_per_step(chain, nullptr);
    shard::Sharded sharded = shard::fully_shard(chain, world->groups(comm::Mesh(1, 0)));
    const double added = seconds_per_step(chain, &sharded) - plain;
    const auto per_unit = [&](double seconds) { return seconds * 1e6 / static_cast<double>(units); };
    std::printf("%lld units: %.2f µs each without sharding\n", static_cast<long long>(units), per_unit(plain));
    print_figure("shard_engine_us_per_unit_" + std::to_string(units), per_unit(added), "µs");
    by_size[units] = per_unit(added);
  }
  if (by_size.contains(1000) && by_size.contains(10'000)) {
    print_figure("shard_engine_growth_1000_to_10000", by_size[10'000] / by_size[1000], "x", 1.5);
  }
  world->close();
  return 0;
}

// ---- arithmetic

// What a rank of a large world works out before its first step: its place in the mesh, and where the parameters of a
// layer lie. `body` returns something that depends on all of it, so that none of it is left out.
template <class Body>
double microseconds(const Body& body) {
  constexpr int kCalls = 100;  // a clock's tick is no small part of one
  std::vector<double> times;
  int64_t sum = 0;
  for (int i = 0; i < 101; ++i) {
    const double begin = cpu_seconds();
    for (int call = 0; call < kCalls; ++call) sum += body(i * kCalls + call);
    times.push_back((cpu_seconds() - begin) * 1e6 / kCalls);
  }
  if (sum == 0) std::abort();
  return median(times);
}

int64_t mesh_of(int world, int rank) {
  const comm::Mesh mesh(world, rank, {.data_parallel_replicate = 16});
  return mesh.shard_index() + mesh.replicate_index() + static_cast<int64_t>(mesh.shard_name().size()) +
         static_cast<int64_t>(mesh.replicate_name().size()) + mesh.shard_ranks().back() + mesh.replicate_ranks().back();
}

// A layer of Llama 2 7B: attention, mlp, norms.
int64_t layout_of(int64_t ranks, int64_t rank) {
  constexpr int64_t kWidth = 4096, kInner = 11008;
  std::vector<shard::FlatItem> items(4, {.numel = kWidth * kWidth});
  items.insert(items.end(), 3, {.numel = kWidth * kInner});
  items.insert(items.end(), 2, {.numel = kWidth});
  const shard::FlatLayout layout(items, ranks, /*alignment=*/16);
  int64_t sum = layout.padding();
  const auto [first, last] = layout.items_of(rank);
  for (std::size_t i = first; i < last; ++i) sum += layout.piece(i, rank).numel();
  return sum;
}

int arithmetic() {
  for (const int ranks : {64, 16'384}) {
    const std::string at = "_at_" + std::to_string(ranks) + "_ranks";
    print_figure("shard_mesh_us" + at, microseconds([&](int i) { return mesh_of(ranks, i % ranks); }), "µs");
    print_figure("shard_layout_us" + at, microseconds([&](int i) { return layout_of(ranks, i % ranks); }), "µs");
  }
  return 0;
}

}  // namespace
}  // namespace neap::bench

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "engine") {
    std::vector<int64_t> sizes;
    for (int i = 2; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
    return neap::bench::engine(sizes);
  }
  if (what == "arithmetic") return neap::bench::arithmetic();
  if (what == "step") return neap::bench::shard_step(argc, argv);
  std::fprintf(stderr, "expected: shard_bench engine [UNITS…] | arithmetic | step …\n");
  return 2;
}
