// torch-free
// Token files, their permutation, and the sequences cut from them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <numeric>
#include <set>

#include "neap/base/error.h"
#include "neap/train/sequences.h"
#include "testing/error_of.h"

namespace neap::train {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

class DataTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "neap-data-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(dir_ / name, std::ios::binary) << bytes;
    return dir_ / name;
  }
  template <class T>
  static std::string raw(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }
  static std::string llmc(int32_t magic, int32_t version, int32_t tokens) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = tokens;
    return raw(header);
  }

  std::filesystem::path dir_;
};

std::vector<int64_t> all(const TokenFile& file) {
  std::vector<int64_t> out(static_cast<size_t>(file.size()));
  file.read(0, out);
  return out;
}

TEST_F(DataTest, ReadsBareTokensOfBothWidthsLlmCAndText) {
  const auto narrow = write("a.bin", raw<uint16_t>({1, 2, 65535}));
  EXPECT_THAT(all(TokenFile::open(narrow)), ElementsAre(1, 2, 65535));
  const auto wide = write("b.bin", raw<uint32_t>({7, 100'000}));
  EXPECT_THAT(all(TokenFile::open(wide, DataFormat::kNanoGpt, TokenType::kUint32)), ElementsAre(7, 100'000));
  const auto gpt2 = write("c.bin", llmc(20240520, 1, 2) + raw<uint16_t>({5, 6}));
  EXPECT_THAT(all(TokenFile::open(gpt2)), ElementsAre(5, 6));
  const auto llama3 = write("d.bin", llmc(20240801, 7, 1) + raw<uint32_t>({128'000}));
  EXPECT_THAT(all(TokenFile::open(llama3)), ElementsAre(128'000));
  const auto text = write("e.txt", "hi\xff");
  EXPECT_THAT(all(TokenFile::open(text)), ElementsAre('h', 'i', 255));
}

TEST_F(DataTest, EveryUnusableFileIsNamedWithTheReason) {
  const auto open = [](const std::filesystem::path& path, DataFormat format = DataFormat::kAutomatic) {
    return error_of([&] { TokenFile::open(path, format); });
  };
  EXPECT_THAT(open(dir_ / "none.bin"), HasSubstr("none.bin: cannot be opened: No such file"));
  EXPECT_THAT(open(dir_), HasSubstr("expected a file"));
  EXPECT_THAT(open(write("empty.bin", "")), HasSubstr("the file is empty"));
  EXPECT_THAT(open(write("odd.bin", "abc")), HasSubstr("truncated: 3 bytes are not a whole number of 2-byte tokens"));
  EXPECT_THAT(open(write("short.bin", llmc(20240520, 1, 9) + "abcd")),
              HasSubstr("truncated: the header promises 9 tokens, the file holds 2"));
  EXPECT_THAT(open(write("long.bin", llmc(20240520, 1, 1) + "abcd")), HasSubstr("longer than it says"));
  EXPECT_THAT(open(write("cut.bin", llmc(20240520, 1, 1).substr(0, 500))),
              HasSubstr("truncated: llm.c's header alone has 1024 bytes, the file has 500"));
  EXPECT_THAT(open(write("version.bin", llmc(20240520, 3, 0))), HasSubstr("found magic 20240520 version 3"));
  EXPECT_THAT(open(write("plain.bin", "abcd"), DataFormat::kLlmC), HasSubstr("the file has 4"));
}

TEST_F(DataTest, ATokenOutsideTheVocabularyIsNamedWithItsPosition) {
  const TokenFile file = TokenFile::open(write("a.bin", raw<uint16_t>({1, 2, 300, 4})));
  EXPECT_NO_THROW(file.check_vocabulary(301));
  EXPECT_THAT(error_of([&] { file.check_vocabulary(300); }),
              HasSubstr("expected tokens below the model's vocabulary of 300; found 300 at position 2"));
}

TEST_F(DataTest, AFileShorterThanOneSequenceAndItsLabelIsAnError) {
  const TokenFile file = TokenFile::open(write("a.txt", "abcd"));
  EXPECT_EQ(Sequences(file, {.length = 3}).per_epoch(), 1);
  EXPECT_THAT(error_of([&] { Sequences(file, {.length = 4}); }),
              HasSubstr("holds 4 tokens; one sequence of 4 needs 5"));
}

TEST_F(DataTest, LabelsAreTheInputsOneTokenLater) {
  const TokenFile file = TokenFile::open(write("a.txt", "abcdefg"));
  const Sequences sequences(file, {.length = 3, .shuffle = false, .seed = 0});
  EXPECT_EQ(sequences.per_epoch(), 2);
  std::vector<int64_t> inputs(3);
  std::vector<int64_t> labels(3);
  for (const int64_t position : {1, 3}) {  // the second epoch repeats the file's order
    sequences.read(position, inputs, labels);
    EXPECT_THAT(inputs, ElementsAre('d', 'e', 'f'));
    EXPECT_THAT(labels, ElementsAre('e', 'f', 'g'));
  }
}

TEST_F(DataTest, WhatFollowsADocumentIsNotLearned) {
  const TokenFile file = TokenFile::open(write("a.txt", "ab.de..hi."));
  EXPECT_TRUE(file.contains('.'));
  EXPECT_TRUE(file.contains('i'));
  EXPECT_FALSE(file.contains('c'));
  EXPECT_FALSE(file.contains(300));
  const Sequences sequences(file, {.length = 3, .shuffle = false, .seed = 0, .end_token = '.'});
  std::vector<int64_t> inputs(9);
  std::vector<int64_t> labels(9);
  sequences.read(0, inputs, labels);
  EXPECT_THAT(inputs, ElementsAre('a', 'b', '.', 'd', 'e', '.', '.', 'h', 'i'));
  EXPECT_THAT(labels, ElementsAre('b', '.', kIgnoredLabel, 'e', '.', kIgnoredLabel, kIgnoredLabel, 'i', '.'));
  EXPECT_EQ(sequences.learned(0, 3), 6);
  EXPECT_EQ(sequences.learned(2, 1), 2);
  EXPECT_EQ(sequences.learned(1, 4), 8);  // into the next epoch
  EXPECT_TRUE(sequences.leaves_out());
  EXPECT_EQ(Sequences(file, {.length = 3}).learned(0, 3), 9);
}

TEST_F(DataTest, AnEpochHoldsEverySequenceOnceAndDependsOnSeedAndEpochAlone) {
  const TokenFile file = TokenFile::open(write("a.txt", [] {
    std::string bytes;
    for (int i = 0; i < 101; ++i) bytes += static_cast<char>(i);
    return bytes;
  }()));
  const auto epoch = [&](uint64_t seed, int64_t number) {
    const Sequences sequences(file, {.length = 1, .shuffle = true, .seed = seed});
    std::vector<int64_t> order;
    for (int64_t i = 0; i < 100; ++i) {
      int64_t input = 0;
      int64_t label = 0;
      sequences.read(number * 100 + i, {&input, 1}, {&label, 1});
      EXPECT_EQ(label, input + 1);
      order.push_back(input);
    }
    return order;
  };
  const std::vector<int64_t> first = epoch(1, 0);
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 100);
  EXPECT_EQ(epoch(1, 0), first);
  EXPECT_NE(epoch(1, 1), first);
  EXPECT_NE(epoch(2, 0), first);
}

TEST(Permutation, IsABijectionForEverySmallSize) {
  for (int64_t size = 1; size <= 130; ++size) {
    const Permutation permutation(size, 7, 3);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < size; ++i) seen.insert(permutation(i));
    ASSERT_EQ(static_cast<int64_t>(seen.size()), size);
    ASSERT_EQ(*seen.begin(), 0);
    ASSERT_EQ(*seen.rbegin(), size - 1);
  }
}

TEST(Permutation, StaysInRangeAndDoesNotRepeatAtABillion) {
  const Permutation permutation(1'000'000'007, 1, 0);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 10'000; ++i) {
    const int64_t value = permutation(i * 99'991);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, permutation.size());
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 10'000);
}

TEST(Permutation, LooksRandom) {
  // The mean displacement of a random permutation is size / 3; an almost sorted order would be far below.
  const int64_t size = 10'000;
  const Permutation permutation(size, 5, 0);
  double moved = 0;
  for (int64_t i = 0; i < size; ++i) moved += std::abs(static_cast<double>(permutation(i) - i));
  EXPECT_NEAR(moved / static_cast<double>(size), static_cast<double>(size) / 3, 200);
}

}  // namespace
}  // namespace neap::train
