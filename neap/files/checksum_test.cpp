// torch-free
#include "neap/files/checksum.h"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>

namespace neap::files {
namespace {

TEST(Checksum, HasTheValuesOfXxh64) {
  // With those of the reference implementation, xxhsum -H64.
  EXPECT_EQ(checksum_text(""), "ef46db3751d8e999");
  EXPECT_EQ(checksum_text("a"), "d24ec4f1a98c6e5b");
  EXPECT_EQ(checksum_text("abc"), "44bc2cf5ad770999");
  EXPECT_EQ(checksum_text("Nobody inspects the spammish repetition"), "fbcea83c8a378bf1");
}

TEST(Checksum, DoesNotDependOnHowTheBytesCome) {
  std::string text;
  for (int i = 0; i < 300; ++i) text.push_back(static_cast<char>(i * 7));
  for (std::size_t size : {0, 1, 31, 32, 33, 64, 300}) {
    const std::string_view whole = std::string_view(text).substr(0, size);
    for (std::size_t cut = 0; cut <= size; ++cut) {
      Checksum checksum;
      checksum.update(std::as_bytes(std::span(whole.substr(0, cut))));
      checksum.update(std::as_bytes(std::span(whole.substr(cut))));
      EXPECT_EQ(checksum_text(checksum.value()), checksum_text(whole)) << size << " cut at " << cut;
    }
  }
}

}  // namespace
}  // namespace neap::files
