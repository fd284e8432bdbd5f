// torch-free
#include "neap/comm/internal/call_header.h"

#include <gtest/gtest.h>

namespace neap::comm::internal {
namespace {

CallHeader header() {
  CallHeader made;
  set_text(made.kind, "reduce_scatter");
  set_text(made.op, "sum");
  set_text(made.dtype, "Float");
  made.elements = 4096;
  made.set_unit("layers.3");
  return made;
}

TEST(CallHeader, EqualCallsDoNotDiffer) { EXPECT_EQ(difference(header(), header()), std::nullopt); }

TEST(CallHeader, IsDescribedForPeople) {
  EXPECT_EQ(describe(header()), "reduce_scatter (sum) of 'layers.3', 4096 elements of Float");
}

TEST(CallHeader, SaysWhatDiffers) {
  CallHeader other = header();
  other.set_unit("layers.4");
  EXPECT_EQ(difference(header(), other),
            "it called reduce_scatter (sum) of 'layers.4', 4096 elements of Float, this rank called reduce_scatter "
            "(sum) of 'layers.3', 4096 elements of Float");
  other = header();
  other.number = 7;
  EXPECT_EQ(difference(header(), other),
            "both called reduce_scatter (sum) of 'layers.3', 4096 elements of Float, but as collective number 7 and 0");
  other = header();
  CallHeader scaled = header();
  other.factor = 0.1;
  scaled.factor = 0.1 + 1e-12;  // prints alike
  EXPECT_EQ(difference(scaled, other)->substr(0, 5), "both ");
  other.magic = 1;
  EXPECT_EQ(difference(header(), other), "it runs another version of this program");
}

TEST(CallHeader, LongTextsAreCutButCompareWhole) {
  const std::string label(200, 'x');
  CallHeader a = header(), b = header();
  a.set_unit(label);
  b.set_unit(label);
  EXPECT_EQ(difference(a, b), std::nullopt);
  b.set_unit(label + "y");
  EXPECT_NE(difference(a, b), std::nullopt);
  EXPECT_EQ(describe(a), describe(b));
}

TEST(CallHeader, PiecesHashByValueAndOrder) {
  const int64_t a[] = {0, 4, 8}, b[] = {0, 8, 4};
  EXPECT_NE(hash_pieces(a), hash_pieces(b));
}

}  // namespace
}  // namespace neap::comm::internal
