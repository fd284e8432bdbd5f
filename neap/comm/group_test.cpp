#include "neap/comm/group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <string>
#include <vector>

#include "neap/base/error.h"
#include "neap/comm/world.h"
#include "neap/trace/recorder.h"
#include "testing/collective_contract.h"
#include "testing/error_of.h"
#include "testing/ranks.h"

namespace neap::comm {
namespace {

using neap::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;

class Contract : public ::testing::TestWithParam<int> {};

TEST_P(Contract, HoldsBetweenThreads) {
  run_ranks(GetParam(), [](World& world) { testing::check_collectives(world.all(), c10::kCPU); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Contract, ::testing::Values(1, 2, 3, 4));

TEST(Group, KnowsItsMembers) {
  run_ranks(4, [](World& world) {
    Group& all = world.all();
    EXPECT_EQ(all.name(), "world");
    EXPECT_THAT(all.ranks(), ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(all.rank(), world.rank());
    EXPECT_EQ(all.size(), 4);
  });
}

TEST(Group, MeshGroupsReduceTheirOwnRows) {
  run_ranks(4, [](World& world) {
    const Mesh mesh(4, world.rank(), {.data_parallel_shard = 2, .data_parallel_replicate = 2});
    const auto [shard, replicate] = world.groups(mesh);
    EXPECT_EQ(shard.name(), mesh.shard_name());
    EXPECT_EQ(replicate.rank(), mesh.replicate_index());
    const at::Tensor one = at::full({3}, world.rank(), at::kFloat);
    shard.all_reduce(one, {}, "rows").wait();
    EXPECT_EQ(one[0].item<float>(), world.rank() < 2 ? 1 : 5);
    replicate.all_reduce(one, {}, "columns").wait();
    EXPECT_EQ(one[0].item<float>(), 6);
  });
}

TEST(Group, AMeshOfOneRowSharesTheWorldsGroup) {
  run_ranks(2, [](World& world) {
    const auto [shard, replicate] = world.groups(Mesh(2, world.rank()));
    EXPECT_EQ(&shard, &world.all());
    EXPECT_EQ(replicate.size(), 1);
  });
}

TEST(Group, CollectivesOverlapWithTheCallerAndEndInOrder) {
  std::latch looked(1);
  run_ranks(2, [&](World& world) {
    const at::Tensor first = at::ones({1000}), second = at::ones({1000});
    if (world.rank() == 0) looked.wait();
    Work reduce_first = world.all().all_reduce(first, {}, "first");
    Work reduce_second = world.all().all_reduce(second, {}, "second");
    if (world.rank() == 1) {  // the other has not come, and this thread goes on
      EXPECT_FALSE(reduce_first.done());
      looked.count_down();
    }
    reduce_second.wait();
    EXPECT_TRUE(reduce_first.done());
    EXPECT_TRUE(at::equal(first, at::full({1000}, 2.f)));
    EXPECT_TRUE(at::equal(second, at::full({1000}, 2.f)));
  });
}

TEST(Group, TheSameRanksGiveTheSameGroup) {
  run_ranks(2, [](World& world) { EXPECT_EQ(&world.group({0, 1}, "another name"), &world.all()); });
}

TEST(Group, ADroppedWorkHoldsItsTensorsUntilItIsDone) {
  std::latch looked(1);
  run_ranks(2, [&](World& world) {
    at::Tensor tensor = at::ones({50'000});
    const c10::weak_intrusive_ptr<c10::StorageImpl> memory(tensor.storage().getWeakStorageImpl());
    if (world.rank() == 1) looked.wait();
    world.all().all_reduce(tensor, {}, "dropped");
    tensor.reset();
    if (world.rank() == 0) {
      EXPECT_FALSE(memory.expired()) << "rank 1 has not come yet";
      looked.count_down();
    }
    world.all().barrier("now").wait();
    EXPECT_TRUE(memory.expired());
  });
}

TEST(Group, AWorkThatIsDoneHoldsNothing) {
  run_ranks(2, [](World& world) {
    at::Tensor tensor = at::ones({50'000});
    const c10::weak_intrusive_ptr<c10::StorageImpl> memory(tensor.storage().getWeakStorageImpl());
    Work work = world.all().all_reduce(tensor, {}, "kept");
    work.wait();
    EXPECT_TRUE(at::equal(tensor, at::full({50'000}, 2.f)));
    tensor.reset();
    EXPECT_TRUE(memory.expired());
    work.wait();  // again: nothing to do
  });
}

TEST(Group, CountsCallsBytesAndTheOneCopyThatItMakes) {
  run_ranks(4, [](World& world) {
    Group& group = world.all();
    const at::Tensor full = at::zeros({4000}), mine = at::ones({1000});
    group.all_gather(full, mine, "unit").wait();
    EXPECT_EQ(group.counters().copied, Bytes(4000));
    group.all_gather(full, "unit").wait();
    group.all_gather(full, full.narrow(0, 1000 * world.rank(), 1000), "unit").wait();
    group.reduce_scatter(mine, full, {}, "unit").wait();
    group.all_reduce(full, {}, "unit").wait();
    group.broadcast(mine, 2, "unit").wait();
    const Counters counters = group.counters();
    EXPECT_EQ(counters.copied, Bytes(4000)) << "in place, nothing is copied";
    EXPECT_EQ(counters.of(Collective::kAllGather), (Counters::Kind{3, Bytes(48'000)}));
    EXPECT_EQ(counters.of(Collective::kReduceScatter), (Counters::Kind{1, Bytes(16'000)}));
    EXPECT_EQ(counters.of(Collective::kBarrier).calls, 0);
    EXPECT_EQ(counters.calls(), 6);
    // Three gathers and a scatter of 12,000 each way, a small all_reduce of 3 whole rows, the broadcast.
    const int64_t moved = 4 * 12'000 + 3 * 16'000;
    EXPECT_EQ(counters.sent, Bytes(moved + (world.rank() == 2 ? 3 * 4000 : 0)));
    EXPECT_EQ(counters.received, Bytes(moved + (world.rank() == 2 ? 0 : 4000)));
  });
}

TEST(Group, TracesWhatItDoes) {
  trace::Recorder recorder;
  testing::RanksOptions options;
  options.world.recorder = &recorder;
  run_ranks(
      2, [](World& world) { world.all().all_reduce(at::ones({10}), {}, "layers.3").wait(); }, options);
  const auto spans = recorder.snapshot().find("comm/world", "all_reduce layers.3");
  ASSERT_EQ(spans.size(), 2u) << "one of each rank";
  EXPECT_LE(spans[0].begin_ns, spans[0].end_ns);
}

// The bits follow from the ranks' values alone, wherever an element lies and however the buffer is cut.
TEST(Group, SumsDoNotDependOnLayout) {
  run_ranks(3, [](World& world) {
    Group& group = world.all();
    const at::Tensor values = at::arange(1, 30'001, at::kFloat).reciprocal().mul(world.rank() * 1.7 + 0.1);
    const at::Tensor whole = values.clone();
    group.all_reduce(whole, {}, "whole").wait();
    for (const auto& pieces : {std::vector<int64_t>{10'000, 10'000, 10'000}, {1, 29'999, 0}, {0, 7, 29'993}}) {
      const int64_t size = pieces[static_cast<size_t>(world.rank())];
      int64_t begin = 0;
      for (int r = 0; r < world.rank(); ++r) begin += pieces[static_cast<size_t>(r)];
      const at::Tensor mine = at::zeros({size});
      group.reduce_scatter(mine, values, {}, "pieces", pieces).wait();
      EXPECT_TRUE(at::equal(mine, whole.narrow(0, begin, size)));
    }
    for (int64_t at = 0; at < 30'000; at += 7'500) {
      const at::Tensor part = values.narrow(0, at, 7'500).clone();
      group.all_reduce(part, {}, "part").wait();
      EXPECT_TRUE(at::equal(part, whole.narrow(0, at, 7'500)));
    }
  });
}

TEST(Group, RefusesArgumentsThatMakeNoSense) {
  run_ranks(2, [](World& world) {
    Group& group = world.all();
    const at::Tensor five = at::ones({5}), six = at::ones({6}), three = at::ones({3});
    EXPECT_THAT(error_of([&] { group.all_gather(five, "u"); }),
                HasSubstr("[comm] all_gather of 'u' expected elements that divide by the 2 ranks"));
    EXPECT_THAT(error_of([&] { group.all_gather(six, five, "u"); }), HasSubstr("to have 3 elements of Float on cpu"));
    EXPECT_THAT(error_of([&] { group.all_gather(six, three.to(at::kDouble), "u"); }), HasSubstr("found 3 of Double"));
    EXPECT_THAT(error_of([&] { group.all_gather(at::ones({4, 6}).t(), "u"); }), HasSubstr("contiguous"));
    EXPECT_THAT(error_of([&] { group.all_gather(at::Tensor(), "u"); }), HasSubstr("found none"));
    const std::vector<int64_t> pieces{3, 4}, negative{-1, 7};
    EXPECT_THAT(error_of([&] { group.all_gather(six, "u", pieces); }), HasSubstr("expected 2 pieces of 6 elements"));
    EXPECT_THAT(error_of([&] { group.all_gather(six, "u", negative); }), HasSubstr("found -1"));
    EXPECT_THAT(error_of([&] { group.reduce_scatter(five, six, {}, "u"); }),
                HasSubstr("expected a result of this rank's 3 elements"));
    EXPECT_THAT(error_of([&] { group.all_reduce(six.to(at::kBool), {}, "u"); }), HasSubstr("found Bool"));
    EXPECT_THAT(error_of([&] { group.all_reduce(six.to(at::kLong), {.op = ReduceOp::kAverage}, "u"); }),
                HasSubstr("found an average"));
    EXPECT_THAT(error_of([&] { group.all_reduce(six, {.op = ReduceOp::kMax, .factor = 2}, "u"); }),
                HasSubstr("no factor with a maximum"));
    EXPECT_THAT(error_of([&] { group.broadcast(six, 2, "u"); }), HasSubstr("expected a root below"));
    EXPECT_THAT(error_of([&] { world.group({1, 0}, "backwards"); }), HasSubstr("ascending"));
    EXPECT_THAT(error_of([&] { world.group({1 - world.rank()}, "others"); }), HasSubstr("among them"));
    // None of that reached the other rank.
    group.barrier("still alive").wait();
  });
}

}  // namespace
}  // namespace neap::comm
