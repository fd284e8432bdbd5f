// What ends a world: the same story on every rank, in time, whoever began it.
#include "neap/comm/failure.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "neap/base/scope_exit.h"
#include "neap/comm/internal/local_fabric.h"
#include "neap/comm/world.h"
#include "testing/ranks.h"

namespace neap::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_ranks;

using Body = std::function<void(World&)>;

// What each rank's body threw.
std::vector<std::string> errors_of(int ranks, const Body& body,
                                   std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  std::vector<std::string> texts(static_cast<size_t>(ranks), "no error");
  testing::RanksOptions options;
  options.world.timeout = timeout;
  const auto guarded = [&](World& world) {
    try {
      body(world);
    } catch (const std::exception& error) {
      texts[static_cast<size_t>(world.rank())] = error.what();
      throw;
    }
  };
  try {
    run_ranks(ranks, guarded, options);
    ADD_FAILURE() << "expected some rank to fail";
  } catch (const Error&) {
  }
  return texts;
}

struct Odd {
  const char* name;
  std::function<void(Group&)> usual, odd;
  const char* expected;
};

class Mismatched : public ::testing::TestWithParam<Odd> {};

TEST_P(Mismatched, EndsEveryRankWithTheReason) {
  const auto& [name, usual, odd, expected] = GetParam();
  const auto texts = errors_of(3, [&](World& world) {
    world.all().barrier("in step").wait();
    (world.rank() == 1 ? odd : usual)(world.all());
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("[comm] rank "), HasSubstr("'layers.3'"), HasSubstr("in group 'world'"),
                                HasSubstr(expected))));
  EXPECT_THAT(texts[0], HasSubstr("rank 1 does something else"));
  EXPECT_THAT(texts[2], HasSubstr("rank 1 does something else"));
}

const std::vector<int64_t> kPieces{2, 2, 2}, kOtherPieces{6, 0, 0};
const std::string kLong(100, 'x');

INSTANTIATE_TEST_SUITE_P(
    Collectives, Mismatched,
    ::testing::Values(
        Odd{"Kind", [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.3").wait(); },
            [](Group& g) { g.all_gather(at::ones({6}), "layers.3").wait(); }, "all_gather of 'layers.3', 6 elements"},
        Odd{"Size", [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.3").wait(); },
            [](Group& g) { g.all_reduce(at::ones({9}), {}, "layers.3").wait(); }, "9 elements of Float"},
        Odd{"Dtype", [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.3").wait(); },
            [](Group& g) { g.all_reduce(at::ones({6}, at::kDouble), {}, "layers.3").wait(); }, "6 elements of Double"},
        Odd{"Unit", [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.3").wait(); },
            [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.4").wait(); }, "'layers.4'"},
        Odd{"LongUnit", [](Group& g) { g.all_reduce(at::ones({6}), {}, "'layers.3'" + kLong + "a").wait(); },
            [](Group& g) { g.all_reduce(at::ones({6}), {}, "'layers.3'" + kLong + "b").wait(); },
            "the labels differ further on"},
        Odd{"Operation", [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.3").wait(); },
            [](Group& g) { g.all_reduce(at::ones({6}), {.op = ReduceOp::kMax}, "layers.3").wait(); }, "(maximum)"},
        Odd{"Factor", [](Group& g) { g.all_reduce(at::ones({6}), {}, "layers.3").wait(); },
            [](Group& g) { g.all_reduce(at::ones({6}), {.factor = 0.5}, "layers.3").wait(); }, "factor 0.5"},
        Odd{"Root", [](Group& g) { g.broadcast(at::ones({6}), 0, "layers.3").wait(); },
            [](Group& g) { g.broadcast(at::ones({6}), 1, "layers.3").wait(); }, "from rank 1"},
        Odd{"Pieces", [](Group& g) { g.all_gather(at::ones({6}), "layers.3", kPieces).wait(); },
            [](Group& g) { g.all_gather(at::ones({6}), "layers.3", kOtherPieces).wait(); },
            "cut the buffer differently"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Failure, AMismatchIsTheUsersToMend) {
  EXPECT_THROW(run_ranks(2, [](World& world) { world.all().all_reduce(at::ones({1 + world.rank()}), {}, "u").wait(); }),
               Mismatch);
}

TEST(Failure, AnExceptionOnOneRankEndsTheOthersAndNamesItsReason) {
  const auto texts = errors_of(3, [](World& world) {
    if (world.rank() == 2) throw std::runtime_error("out of cheese in layers.7");
    world.all().all_gather(at::ones({6}), "layers.3").wait();
  });
  EXPECT_EQ(texts[2], "out of cheese in layers.7");
  for (const int rank : {0, 1})
    EXPECT_THAT(texts[static_cast<size_t>(rank)],
                AllOf(HasSubstr("all_gather of 'layers.3' in group 'world' (ranks 0, 1, 2)"),
                      HasSubstr("rank 2 left: out of cheese in layers.7")));
}

TEST(Failure, TheErrorOfTheRankThatBeganItIsThrownWithItsNumber) {
  try {
    run_ranks(3, [](World& world) {
      NEAP_CHECK(world.rank() != 1, "no such key");
      world.all().barrier("b").wait();
    });
    FAIL();
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "rank 1: no such key");
  }
}

// Rank 0 has no group in common with rank 3.
TEST(Failure, ReachesGroupsThatTheFailedRankIsNotIn) {
  const auto texts = errors_of(4, [](World& world) {
    const auto groups = world.groups(Mesh(4, world.rank(), {.data_parallel_shard = 2, .data_parallel_replicate = 2}));
    if (world.rank() == 3) throw std::runtime_error("gone");
    for (;;) {
      groups.shard.all_reduce(at::ones({4}), {}, "rows").wait();
      groups.replicate.all_reduce(at::ones({4}), {}, "columns").wait();
    }
  });
  for (const int rank : {0, 1, 2}) EXPECT_THAT(texts[static_cast<size_t>(rank)], HasSubstr("rank 3 left: gone"));
}

TEST(Failure, ARankThatDoesNotComeEndsTheOthersAfterTheTimeout) {
  std::latch others_gave_up(2);
  const auto texts = errors_of(
      3,
      [&](World& world) {
        world.all().barrier("in step").wait();
        if (world.rank() == 1) {
          others_gave_up.wait();
          world.all().all_reduce(at::ones({4}), {}, "layers.3").wait();
        }
        const ScopeExit gave_up([&] { others_gave_up.count_down(); });
        world.all().all_reduce(at::ones({4}), {}, "layers.3").wait();
      },
      std::chrono::milliseconds(300));
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("all_reduce of 'layers.3' in group 'world'"),
                                HasSubstr("waited 0.3 s for rank 1, which has not called it"))));
}

TEST(Failure, ARankThatReturnsEarlyIsAMismatchNotAHang) {
  const auto texts = errors_of(2, [](World& world) {
    if (world.rank() == 0) return;
    world.all().all_reduce(at::ones({4}), {}, "layers.3").wait();
  });
  EXPECT_THAT(texts[1], HasSubstr("rank 0 does something else: it called barrier of 'close'"));
}

TEST(Failure, EverythingAfterItFailsAtOnceWithTheSameCause) {
  const auto texts = errors_of(2, [](World& world) {
    if (world.rank() == 1) throw std::runtime_error("gone");
    Group& group = world.all();
    Work pending = group.all_reduce(at::ones({4}), {}, "first");
    EXPECT_THROW(pending.wait(), RankFailure);
    EXPECT_THROW(pending.wait(), RankFailure) << "each time";
    EXPECT_TRUE(pending.done());
    EXPECT_THROW(group.barrier("second"), RankFailure);
    EXPECT_THROW(world.check(), RankFailure);
    EXPECT_THROW(world.group({0, 1}, "cached").all_gather(at::ones({2}), "u"), RankFailure);
    world.check();
  });
  EXPECT_THAT(texts[0], HasSubstr("rank 1 left: gone"));
}

TEST(Failure, AWorldThatIsNotClosedTellsTheOthers) {
  const auto hub = std::make_shared<internal::LocalHub>(2, std::chrono::minutes(1));
  std::thread leaves([&] {
    World world(std::make_unique<internal::LocalFabric>(hub, 1), {});
    world.all();
  });
  World world(std::make_unique<internal::LocalFabric>(hub, 0), {});
  try {
    world.all().barrier("never").wait();
    ADD_FAILURE() << "the barrier is through";
  } catch (const RankFailure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("rank 1 left: it ended without closing its world"));
  }
  leaves.join();
}

TEST(Failure, AGroupThatNotAllItsMembersMakeEndsEveryone) {
  const auto texts = errors_of(
      3,
      [](World& world) {
        world.all();
        if (world.rank() == 0) world.group({0, 1}, "pair");
        world.all().barrier("later").wait();
      },
      std::chrono::milliseconds(300));
  EXPECT_THAT(texts[0], HasSubstr("connecting 2 ranks for group 'pair'"));
  // Whichever was first, the barrier that rank 0 does not call or the group that rank 1 does not make.
  for (const auto& text : texts) EXPECT_THAT(text, AnyOf(HasSubstr("'pair'"), HasSubstr("barrier of 'later'")));
}

}  // namespace
}  // namespace neap::comm
