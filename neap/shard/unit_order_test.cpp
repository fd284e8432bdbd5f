// torch-free
#include "neap/shard/unit_order.h"

#include <gtest/gtest.h>

namespace neap::shard {
namespace {

constexpr int kUnknown = UnitOrder::kUnknown;

TEST(UnitOrder, KnowsNothingInTheFirstPassAndEverythingInTheSecond) {
  UnitOrder order;
  for (const int unit : {0, 1, 2}) EXPECT_EQ(order.advance(unit), kUnknown);
  order.restart();
  EXPECT_EQ(order.advance(0), 1);
  EXPECT_EQ(order.advance(1), 2);
  EXPECT_EQ(order.advance(2), kUnknown);
}

TEST(UnitOrder, AUnitThatRunsTwiceHasTwoSuccessors) {
  UnitOrder order;
  for (const int unit : {0, 1, 0, 2}) order.advance(unit);
  order.restart();
  EXPECT_EQ(order.advance(0), 1);
  EXPECT_EQ(order.advance(1), 0);
  EXPECT_EQ(order.advance(0), 2);
}

TEST(UnitOrder, AnotherWayIsRecordedFromWhereItParts) {
  UnitOrder order;
  for (const int unit : {0, 1, 2, 3}) order.advance(unit);
  order.restart();
  EXPECT_EQ(order.advance(0), 1);
  EXPECT_EQ(order.advance(3), kUnknown);
  EXPECT_EQ(order.advance(2), kUnknown);
  order.restart();
  EXPECT_EQ(order.advance(0), 3);
  EXPECT_EQ(order.advance(3), 2);
}

}  // namespace
}  // namespace neap::shard
