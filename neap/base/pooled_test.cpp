// torch-free
#include "neap/base/pooled.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace neap {
namespace {

struct Item : Pooled<Item> {
  explicit Item(int64_t n) : first(n), last(n) {}
  int64_t first;
  char between[100] = {};
  int64_t last;
};

TEST(Pooled, ObjectsDoNotOverlapAndTheirMemoryServesAgain) {
  std::set<const void*> places;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Item>> items;
    for (int64_t i = 0; i < 2000; ++i) {
      items.push_back(std::make_unique<Item>(i));
      if (round == 0) places.insert(items.back().get());
    }
    for (int64_t i = 0; i < 2000; ++i) {
      EXPECT_EQ(items[static_cast<size_t>(i)]->first, i);
      EXPECT_EQ(items[static_cast<size_t>(i)]->last, i);
    }
#if !defined(__SANITIZE_ADDRESS__)
    if (round > 0) {
      EXPECT_TRUE(places.contains(items.front().get()));
    }
#endif
  }
  EXPECT_EQ(places.size(), 2000U);
}

TEST(Pooled, AnotherThreadMayDestroy) {
  for (int round = 0; round < 10; ++round) {
    std::vector<std::unique_ptr<Item>> items;
    for (int64_t i = 0; i < 500; ++i) items.push_back(std::make_unique<Item>(i));
    std::thread([taken = std::move(items)]() mutable { taken.clear(); }).join();
  }
}

TEST(Pooled, ADerivedClassOfAnotherSizeIsServedToo) {
  struct Larger : Item {
    Larger() : Item(1) {}
    int64_t more[64] = {};
  };
  std::vector<std::unique_ptr<Larger>> items;
  for (int i = 0; i < 100; ++i) items.push_back(std::make_unique<Larger>());
  for (const auto& item : items) EXPECT_EQ(item->last, 1);
}

}  // namespace
}  // namespace neap
