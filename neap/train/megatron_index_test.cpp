// torch-free
// Megatron's .bin and .idx: what is read, and every way in which the two may not fit.
#include "neap/train/megatron_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "neap/train/token_file.h"
#include "testing/error_of.h"

namespace neap::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// The fields of an index, so that a test can break one of them.
struct Index {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t code = 8;
  std::vector<int32_t> lengths = {2, 0, 3};
  std::vector<int64_t> pointers = {0, 4, 4};
  std::vector<int64_t> documents = {0, 1, 3};
  int64_t counted_sequences = 3;
  int64_t counted_entries = 3;

  std::string bytes() const {
    return magic + raw<uint64_t>({version}) + raw<uint8_t>({code}) +
           raw<int64_t>({counted_sequences, counted_entries}) + raw(lengths) + raw(pointers) + raw(documents);
  }
};

class MegatronTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "neap-megatron-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(dir_ / name, std::ios::binary) << bytes;
  }
  std::string error_with(const std::string& index, const std::string& bin) const {
    write("x.idx", index);
    write("x.bin", bin);
    return error_of([&] { TokenFile::open(dir_ / "x.bin"); });
  }
  // The index alone is wrong.
  template <class Break>
  std::string error_after(Break&& change) const {
    Index index;
    change(index);
    return error_with(index.bytes(), kTokens);
  }

  const std::string kTokens = raw<uint16_t>({5, 6, 7, 8, 65535});
  std::filesystem::path dir_;
};

std::vector<int64_t> tokens_of(const TokenFile& file) {
  std::vector<int64_t> out(static_cast<size_t>(file.size()));
  file.read(0, out);
  return out;
}

TEST_F(MegatronTest, IsFoundByEitherFileAndByTheNameOfBoth) {
  write("v1.2_document.bin", kTokens);
  write("v1.2_document.idx", Index{}.bytes());
  for (const char* name : {"v1.2_document.bin", "v1.2_document.idx", "v1.2_document"}) {
    const TokenFile file = TokenFile::open(dir_ / name);
    EXPECT_EQ(file.name(), (dir_ / "v1.2_document.bin").string());
    EXPECT_THAT(tokens_of(file), ElementsAre(5, 6, 7, 8, 65535));
  }
  EXPECT_EQ(TokenFile::open(dir_ / "v1.2_document.bin", DataFormat::kNanoGpt, TokenType::kUint8).size(), 10);
  const MegatronIndex index = read_megatron_index(megatron_paths(dir_ / "v1.2_document"), 10);
  EXPECT_EQ(index.sequences, 3);
  EXPECT_EQ(index.documents, 2);
  EXPECT_EQ(index.tokens, 5);
}

TEST_F(MegatronTest, TokensMayHaveEveryTypeOfIntegers) {
  const auto read = [&](uint8_t code, const std::string& tokens) {
    const auto width = static_cast<int64_t>(tokens.size() / 2);
    Index index;
    index.code = code;
    index.lengths = {1, 1};
    index.pointers = {0, width};
    index.documents = {0, 2};
    index.counted_sequences = index.counted_entries = 2;
    EXPECT_EQ(error_with(index.bytes(), tokens), testing::kNoError);
    return tokens_of(TokenFile::open(dir_ / "x.bin"));
  };
  EXPECT_THAT(read(1, raw<uint8_t>({1, 255})), ElementsAre(1, 255));
  EXPECT_THAT(read(2, raw<int8_t>({1, -1})), ElementsAre(1, -1));
  EXPECT_THAT(read(3, raw<int16_t>({1, -1})), ElementsAre(1, -1));
  EXPECT_THAT(read(4, raw<int32_t>({1, 128'000})), ElementsAre(1, 128'000));
  EXPECT_THAT(read(5, raw<int64_t>({1, int64_t{1} << 40})), ElementsAre(1, int64_t{1} << 40));
  EXPECT_THAT(read(8, raw<uint16_t>({1, 65535})), ElementsAre(1, 65535));
}

TEST_F(MegatronTest, ANegativeTokenIsOutsideTheVocabulary) {
  Index index;
  index.code = 4;
  index.lengths = {2};
  index.pointers = {0};
  index.documents = {0, 1};
  index.counted_sequences = 1;
  index.counted_entries = 2;
  EXPECT_EQ(error_with(index.bytes(), raw<int32_t>({3, -7})), testing::kNoError);
  EXPECT_THAT(error_of([&] { TokenFile::open(dir_ / "x.bin").check_vocabulary(100); }),
              HasSubstr("vocabulary of 100; found -7 at position 1"));
}

TEST_F(MegatronTest, ABrokenHeaderNamesTheIndexAndWhatWasExpected) {
  EXPECT_THAT(error_after([](Index& index) { index.magic[2] = 'X'; }),
              AllOf(HasSubstr("x.idx: expected the index of a Megatron token file"), HasSubstr("data.format")));
  EXPECT_THAT(error_after([](Index& index) { index.version = 2; }), HasSubstr("x.idx: expected version 1; found 2"));
  EXPECT_THAT(error_after([](Index& index) { index.code = 6; }), HasSubstr("5 (int64) or 8 (uint16); found 6"));
  EXPECT_THAT(error_with("", kTokens), HasSubstr("which begins with MMIDIDX"));
  EXPECT_THAT(error_with(Index{}.bytes().substr(0, 33), kTokens),
              HasSubstr("truncated: a header takes 34 bytes, the file has 33"));
}

TEST_F(MegatronTest, CountsThatTheFileDoesNotHoldAreErrorsHoweverLarge) {
  EXPECT_THAT(error_with(Index{}.bytes() + "abc", kTokens), HasSubstr("with modes, which is multimodal"));  // one each
  EXPECT_THAT(error_with(Index{}.bytes() + "ab", kTokens), HasSubstr("longer than it says: 2 bytes follow"));
  const std::string whole = Index{}.bytes();
  EXPECT_THAT(error_with(whole.substr(0, whole.size() - 1), kTokens),
              HasSubstr("truncated: the header promises 3 sequences (12 bytes each) and 3 document entries"));
  for (const int64_t count : {int64_t{4}, int64_t{1} << 60, int64_t{-1}}) {
    EXPECT_THAT(error_after([&](Index& index) { index.counted_sequences = count; }), HasSubstr("truncated: "));
    EXPECT_THAT(error_after([&](Index& index) { index.counted_entries = count; }), HasSubstr("truncated: "));
  }
}

TEST_F(MegatronTest, SequencesHaveToLieInTheTokenFileOneAfterTheOther) {
  EXPECT_THAT(error_after([](Index& index) { index.lengths[1] = -1; }),
              HasSubstr("expected a length of sequence 1 from 0; found -1"));
  EXPECT_THAT(error_after([](Index& index) { index.pointers[2] = 6; }), HasSubstr("expected sequence 2 at byte 4 of"));
  EXPECT_THAT(error_after([](Index& index) { index.pointers[0] = -2; }), HasSubstr("expected sequence 0 at byte 0"));
  EXPECT_THAT(error_after([](Index& index) { index.lengths[2] = 4; }),
              HasSubstr("found it from byte 4 on for 4 tokens of 2 bytes, and the file ends at 10"));
  EXPECT_THAT(error_after([](Index& index) { index.lengths[2] = 2; }),
              HasSubstr("found sequences up to byte 8, the file ends at 10"));
  EXPECT_THAT(error_with(Index{}.bytes(), kTokens.substr(0, 9)), HasSubstr("x.bin; found it from byte 4 on"));
  EXPECT_THAT(error_with(Index{}.bytes(), ""), HasSubstr("x.bin: the file is empty"));
}

TEST_F(MegatronTest, DocumentsHaveToCoverTheSequencesInOrder) {
  EXPECT_THAT(error_after([](Index& index) { index.documents[0] = 1; }),
              HasSubstr("expected the first document at sequence 0; found 1"));
  EXPECT_THAT(error_after([](Index& index) { index.documents[1] = 4; }),
              HasSubstr("expected document entry 1 from 0 to 3; found 4"));
  EXPECT_THAT(error_after([](Index& index) { index.documents[2] = 0; }),
              HasSubstr("expected document entry 2 from 1 to 3; found 0"));
  EXPECT_THAT(error_after([](Index& index) { index.documents[2] = 2; }),
              HasSubstr("expected the last document to end with sequence 3; found 2"));
  EXPECT_THAT(error_after([](Index& index) {
                index.documents.clear();
                index.counted_entries = 0;
              }),
              HasSubstr("expected at least one document entry; found none"));
}

TEST_F(MegatronTest, ItsOtherHalfMissingIsAnError) {
  write("x.bin", kTokens);
  EXPECT_THAT(error_of([&] { TokenFile::open(dir_ / "x.bin", DataFormat::kMegatron); }),
              HasSubstr("x.idx: cannot be opened: No such file"));
  write("y.idx", Index{}.bytes());
  EXPECT_THAT(error_of([&] { TokenFile::open(dir_ / "y.idx"); }), HasSubstr("y.bin: cannot be opened: No such file"));
}

}  // namespace
}  // namespace neap::train
