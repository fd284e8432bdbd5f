#include "neap/memory/free_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "neap/base/error.h"

namespace neap::memory {
namespace {

using Place = FreeList::Place;

TEST(FreeList, GivesTheSmallestChunkThatFits) {
  FreeList list;
  list.add_slab(0, 100);
  const auto a = list.allocate(30);
  const auto gap_of_10 = list.allocate(10);
  const auto b = list.allocate(20);
  list.release(*a);          // free: 30 at 0
  list.release(*gap_of_10);  // joins it: 40 at 0, and 40 at 60
  EXPECT_EQ(list.allocate(40), (Place{0, 0}));
  list.release(*b);  // 60 at 40
  EXPECT_EQ(list.largest_free(), 60);
  list.check();
}

TEST(FreeList, TakesTheOldestSlabAndLowestOffsetAmongEqualChunks) {
  FreeList list;
  list.add_slab(7, 50);
  list.add_slab(3, 50);
  EXPECT_EQ(list.allocate(50), (Place{3, 0}));
  EXPECT_EQ(list.allocate(50), (Place{7, 0}));
  EXPECT_EQ(list.allocate(1), std::nullopt);
}

TEST(FreeList, JoinsNeighboursOnBothSidesButNeverAcrossSlabs) {
  FreeList list;
  list.add_slab(0, 30);
  list.add_slab(1, 30);
  std::vector<Place> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(*list.allocate(10));
  EXPECT_FALSE(list.release(blocks[0]));
  EXPECT_FALSE(list.release(blocks[2]));
  EXPECT_EQ(list.largest_free(), 10);
  EXPECT_TRUE(list.release(blocks[1]));  // middle: three become one, the slab is free
  EXPECT_EQ(list.largest_free(), 30);
  for (int i : {3, 4, 5}) list.release(blocks[i]);
  EXPECT_EQ(list.largest_free(), 30);
  EXPECT_EQ(list.free_bytes(), 60);
  list.check();
}

TEST(FreeList, RefusesADoubleAndAForeignRelease) {
  FreeList list;
  list.add_slab(0, 100);
  const auto block = *list.allocate(10);
  list.release(block);
  EXPECT_THROW(list.release(block), InternalError);
  EXPECT_THROW(list.release({0, 50}), InternalError);  // inside a free chunk
  EXPECT_THROW(list.release({9, 0}), InternalError);   // no such slab
  list.check();
}

TEST(FreeList, RemovesOnlyWhollyFreeSlabs) {
  FreeList list;
  list.add_slab(0, 100);
  const auto block = *list.allocate(10);
  EXPECT_THROW(list.remove_slab(0), InternalError);
  list.release(block);
  list.remove_slab(0);
  EXPECT_EQ(list.free_bytes(), 0);
  EXPECT_EQ(list.allocate(1), std::nullopt);
  EXPECT_THROW(list.remove_slab(0), InternalError);
}

TEST(FreeList, CountsBeyondTwoGibibytes) {
  FreeList list;
  constexpr int64_t kHuge = int64_t{5} << 40;
  list.add_slab(0, kHuge);
  const auto first = *list.allocate((int64_t{3} << 31) + 4096);
  const auto second = *list.allocate(int64_t{1} << 40);
  EXPECT_EQ(second.offset, (int64_t{3} << 31) + 4096);
  list.release(first);
  list.release(second);
  EXPECT_EQ(list.largest_free(), kHuge);
}

// The same list, written without regard to speed: one flag per granule.
class ReferenceList {
 public:
  void add_slab(int32_t slab, int64_t size) { used_[slab].assign(size, false); }
  void remove_slab(int32_t slab) { used_.erase(slab); }
  std::optional<Place> allocate(int64_t size) {
    std::optional<std::pair<int64_t, Place>> best;
    for (const auto& [slab, used] : used_) {
      for (int64_t at = 0; at < std::ssize(used);) {
        const auto end = std::find(used.begin() + at, used.end(), true) - used.begin();
        if (end - at >= size) best = std::min(best.value_or(std::pair{INT64_MAX, Place{}}), {end - at, {slab, at}});
        at = std::find(used.begin() + end, used.end(), false) - used.begin();
      }
    }
    if (!best) return std::nullopt;
    mark(best->second, size, true);
    return best->second;
  }
  void release(Place place, int64_t size) { mark(place, size, false); }
  bool is_free(int32_t slab) const { return std::ranges::count(used_.at(slab), true) == 0; }
  int64_t free_bytes() const {
    int64_t sum = 0;
    for (const auto& [slab, used] : used_) sum += std::ranges::count(used, false);
    return sum;
  }

 private:
  void mark(Place place, int64_t size, bool value) {
    auto& used = used_.at(place.slab);
    ASSERT_EQ(std::count(used.begin() + place.offset, used.begin() + place.offset + size, value), 0) << "overlap";
    std::fill_n(used.begin() + place.offset, size, value);
  }
  std::map<int32_t, std::vector<bool>> used_;
};

TEST(FreeList, AgreesWithTheReferenceOnRandomHistories) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(random); };
    FreeList list;
    ReferenceList reference;
    std::vector<std::pair<Place, int64_t>> held;
    std::vector<int32_t> slabs;
    int32_t next_slab = 0;
    for (int step = 0; step < 400; ++step) {
      const auto action = pick(0, 9);
      if (action == 0) {
        const auto size = pick(1, 60);
        slabs.push_back(next_slab);
        list.add_slab(next_slab, size);
        reference.add_slab(next_slab++, size);
      } else if (action == 1 && !slabs.empty()) {
        const auto at = pick(0, std::ssize(slabs) - 1);
        ASSERT_EQ(list.slab_is_free(slabs[at]), reference.is_free(slabs[at]));
        if (!list.slab_is_free(slabs[at])) continue;
        list.remove_slab(slabs[at]);
        reference.remove_slab(slabs[at]);
        slabs.erase(slabs.begin() + at);
      } else if (action < 6) {
        const auto size = pick(1, 25);
        const auto place = list.allocate(size);
        ASSERT_EQ(place, reference.allocate(size)) << "seed " << seed << ", step " << step;
        if (place) held.emplace_back(*place, size);
      } else if (!held.empty()) {
        const auto at = pick(0, std::ssize(held) - 1);
        const auto [place, size] = held[at];
        ASSERT_EQ(list.block_size(place), size);
        reference.release(place, size);
        ASSERT_EQ(list.release(place), reference.is_free(place.slab));
        held.erase(held.begin() + at);
      }
      ASSERT_EQ(list.free_bytes(), reference.free_bytes());
      list.check();
    }
  }
}

}  // namespace
}  // namespace neap::memory
