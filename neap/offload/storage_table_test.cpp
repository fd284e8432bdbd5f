// torch-free
#include "neap/offload/storage_table.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>

namespace neap::offload {
namespace {

struct Item {
  explicit Item(int key) : key(key) {}
  int key;
  TableLink<Item> link;
};
using Table = StorageTable<Item, &Item::link>;

Item* find(const Table& table, int key, size_t hash) {
  return table.find(hash, [&](const Item& item) { return item.key == key; });
}

TEST(StorageTable, FindsByHashAndKey) {
  Item a(1), b(2), c(3);
  Table table;
  EXPECT_EQ(find(table, 1, 7), nullptr);
  table.insert(a, 7);
  table.insert(b, 7);       // the same hash
  table.insert(c, 7 + 64);  // the same bucket
  EXPECT_EQ(find(table, 1, 7), &a);
  EXPECT_EQ(find(table, 2, 7), &b);
  EXPECT_EQ(find(table, 3, 7), nullptr);
  EXPECT_EQ(find(table, 3, 7 + 64), &c);
}

TEST(StorageTable, MembersLeaveFromAnyPlaceOfABucket) {
  std::deque<Item> items;
  Table table;
  for (int i = 0; i < 4; ++i) table.insert(items.emplace_back(i), 5);
  table.erase(items[1]);
  table.erase(items[3]);
  table.erase(items[0]);
  EXPECT_EQ(find(table, 2, 5), &items[2]);
  EXPECT_EQ(table.size(), 1);
  EXPECT_THROW(table.erase(items[0]), InternalError);
}

TEST(StorageTable, KeepsItsMembersAsItGrows) {
  std::deque<Item> items;
  Table table;
  for (int i = 0; i < 1000; ++i) table.insert(items.emplace_back(i), static_cast<size_t>(i) * 2654435761u);
  std::set<int> seen;
  table.for_each([&](const Item& item) { seen.insert(item.key); });
  EXPECT_EQ(seen.size(), 1000);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(find(table, i, static_cast<size_t>(i) * 2654435761u), &items[i]);
}

}  // namespace
}  // namespace neap::offload
