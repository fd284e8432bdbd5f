// torch-free
#include "neap/comm/internal/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

#include "neap/comm/internal/local_fabric.h"

namespace neap::comm::internal {
namespace {

// gmock's Each() explains every element, which takes seconds here.
bool all_are(const std::vector<int64_t>& values, int64_t expected) {
  return std::all_of(values.begin(), values.end(), [&](int64_t value) { return value == expected; });
}

// Runs `body` on as many threads as ranks.
template <class Body>
void on_ranks(int ranks, const Body& body) {
  const auto hub = std::make_shared<LocalHub>(ranks, std::chrono::minutes(1));
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto transport = LocalFabric(hub, rank).connect("test", all);
      Progress progress;
      std::vector<std::byte> scratch;
      Exchange exchange(*transport, rank, ranks, progress, scratch);
      body(exchange, rank, scratch);
      // As in a Group, nobody leaves before all are through: a link that goes takes its messages along.
      exchange.headers({});
    });
  }
  for (auto& thread : threads) thread.join();
}

std::byte* bytes(std::vector<int64_t>& values) { return reinterpret_cast<std::byte*>(values.data()); }

ReduceRows add_into(int64_t* result) {
  return [result](std::span<const std::byte* const> rows, int64_t offset, int64_t size) {
    for (int64_t i = 0; i < size / 8; ++i) {
      int64_t sum = 0;
      for (const std::byte* row : rows) sum = sum * 10 + reinterpret_cast<const int64_t*>(row)[i];  // order matters
      result[offset / 8 + i] = sum;
    }
  };
}

int64_t digits(int ranks) {  // 123 for three ranks
  int64_t number = 0;
  for (int r = 0; r < ranks; ++r) number = number * 10 + r + 1;
  return number;
}

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Exchange, Ranks, ::testing::Values(1, 2, 3, 5));

TEST_P(Ranks, GatherPieces) {
  const int n = GetParam();
  on_ranks(n, [n](Exchange& exchange, int rank, auto&) {
    std::vector<int64_t> cuts{0}, full, expected;
    for (int r = 0; r < n; ++r) {
      cuts.push_back(cuts.back() + 8 * (r % 3));
      for (int i = 0; i < r % 3; ++i) expected.push_back(r), full.push_back(r == rank ? r : -1);
    }
    exchange.all_gather(bytes(full), cuts);
    EXPECT_EQ(full, expected);
  });
}

// Through many chunks, and in the order of the ranks whatever the order in which they arrive.
TEST_P(Ranks, ReduceScatterInRankOrderWithBoundedScratch) {
  const int n = GetParam();
  const int64_t piece = 5 * Exchange::kChunk / 8 + 3;
  on_ranks(n, [n, piece](Exchange& exchange, int rank, std::vector<std::byte>& scratch) {
    std::vector<int64_t> cuts{0}, full(static_cast<size_t>(n * piece), rank + 1);
    for (int r = 1; r <= n; ++r) cuts.push_back(r * piece * 8);
    std::vector<int64_t> mine(static_cast<size_t>(piece), -1);
    exchange.reduce_scatter(bytes(full), cuts, 8, add_into(mine.data()));
    EXPECT_TRUE(all_are(mine, digits(n)));
    EXPECT_TRUE(all_are(full, rank + 1));
    EXPECT_EQ(scratch.size(), static_cast<size_t>(2 * (n - 1) * Exchange::kChunk));
    EXPECT_EQ(exchange.sent(), (n - 1) * piece * 8);
    EXPECT_EQ(exchange.received(), (n - 1) * piece * 8);
  });
}

TEST_P(Ranks, AllReduceInPlaceSmallAndLarge) {
  const int n = GetParam();
  for (const int64_t elements :
       {int64_t{0}, int64_t{1}, Exchange::kSmall / 8, Exchange::kSmall / 8 + 1, int64_t{200'003}}) {
    on_ranks(n, [n, elements](Exchange& exchange, int rank, auto&) {
      std::vector<int64_t> values(static_cast<size_t>(elements), rank + 1);
      exchange.all_reduce(bytes(values), elements, 8,
                          [&](int64_t begin) { return add_into(values.data() + begin / 8); });
      EXPECT_TRUE(all_are(values, digits(n)));
    });
  }
}

TEST_P(Ranks, BroadcastFromEach) {
  const int n = GetParam();
  for (int root = 0; root < n; ++root) {
    on_ranks(n, [root](Exchange& exchange, int rank, auto&) {
      std::vector<int64_t> values(1000, rank);
      exchange.broadcast(bytes(values), 8000, root);
      EXPECT_TRUE(all_are(values, root));
    });
  }
}

TEST_P(Ranks, HeadersMeetEverybody) {
  const int n = GetParam();
  on_ranks(n, [n](Exchange& exchange, int rank, auto&) {
    CallHeader mine;
    mine.elements = rank;
    const auto all = exchange.headers(mine);
    for (int r = 0; r < n; ++r) EXPECT_EQ(all[static_cast<size_t>(r)].elements, r);
    EXPECT_EQ(exchange.sent(), 0) << "headers are not payload";
  });
}

TEST(Exchange, NamesThePeerThatIsGone) {
  const auto hub = std::make_shared<LocalHub>(2, std::chrono::minutes(1));
  std::unique_ptr<Transport> gone;
  std::thread other([&] { gone = LocalFabric(hub, 1).connect("test", {0, 1}); });
  const auto transport = LocalFabric(hub, 0).connect("test", {0, 1});
  other.join();
  Progress progress;
  std::vector<std::byte> scratch;
  Exchange exchange(*transport, 0, 2, progress, scratch);
  std::thread leaves([&] { gone.reset(); });
  try {
    exchange.headers({});
    ADD_FAILURE() << "expected PeerLost";
  } catch (const PeerLost& lost) {
    EXPECT_EQ(lost.peer, 1);
    EXPECT_EQ(progress.waits_for, 1);
    EXPECT_FALSE(progress.agreed);
  }
  leaves.join();
}

// Else the one that comes late would wait for links that nobody makes any more.
TEST(LocalHub, AMemberThatComesAfterTheOthersGaveUpIsTurnedAway) {
  LocalHub hub(3, std::chrono::minutes(1));
  std::thread waits([&] { EXPECT_THROW(hub.join("pair", 2), LinkLost); });
  hub.publish_failure("rank 2 left");
  waits.join();
  EXPECT_THROW(hub.join("pair", 2), LinkLost);
  EXPECT_THROW(hub.join("pair", 2), LinkLost);
  EXPECT_EQ(hub.publish_failure("later"), "rank 2 left");
}

TEST(LocalHub, AMeetingThatOneMemberLeavesForLatenessIsOver) {
  LocalHub hub(2, std::chrono::milliseconds(1));
  EXPECT_THROW(hub.join("pair", 2), LinkLost);
  EXPECT_THROW(hub.join("pair", 2), LinkLost);
}

TEST(Exchange, AbortEndsAWaitOfThisRank) {
  const auto hub = std::make_shared<LocalHub>(2, std::chrono::minutes(1));
  std::unique_ptr<Transport> silent;
  std::thread other([&] { silent = LocalFabric(hub, 1).connect("test", {0, 1}); });
  const auto transport = LocalFabric(hub, 0).connect("test", {0, 1});
  other.join();
  std::thread aborts([&] { transport->abort(); });
  Progress progress;
  std::vector<std::byte> scratch;
  EXPECT_THROW(Exchange(*transport, 0, 2, progress, scratch).headers({}), PeerLost);
  aborts.join();
}

}  // namespace
}  // namespace neap::comm::internal
