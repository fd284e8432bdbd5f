// torch-free
#include "neap/checkpoint/index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "neap/checkpoint/test_support.h"
#include "neap/files/checksum.h"
#include "testing/error_of.h"

namespace neap::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

Index example() {
  Index index;
  index.world = 2;
  index.state = {{"step", "7"}, {"config", "a: \"b\"\n"}};
  index.files = {{"rank-00000.safetensors", 100}, {"rank-00001.safetensors", 200}};
  index.tensors["a"] = {files::SafeType::kF32, {3, 4}, {{0, 0, 5, "00"}, {1, 5, 12, "ff"}}};
  index.tensors["scalar"] = {files::SafeType::kBF16, {}, {{1, 0, 1, "01"}}};
  index.tensors["nothing"] = {files::SafeType::kF64, {0, 4}, {}};
  return index;
}

struct IndexFileTest : ::testing::Test {
  std::filesystem::path path() const { return temporary.path() / kIndexName; }
  std::string error_of_reading(const std::string& text) {
    write_file(path(), text);
    const std::string error = testing::error_of([&] { read_index(path()); });
    EXPECT_THAT(error, HasSubstr(path().string()));
    return error;
  }
  // As somebody would write it who gets the checksum right.
  std::string error_of_content(const std::function<void(Json&)>& change) {
    Json json = Json::parse(to_json(example()));
    change(json["content"]);
    json["checksum"] = files::checksum_text(json["content"].dump());
    return error_of_reading(json.dump());
  }

  TemporaryDirectory temporary;
};

TEST_F(IndexFileTest, ReadsWhatWasWritten) {
  write_file(path(), to_json(example()));
  const Index index = read_index(path());
  EXPECT_EQ(to_json(index), to_json(example()));
  EXPECT_EQ(index.state.at("config"), "a: \"b\"\n");
  EXPECT_EQ(index.tensors.at("a").pieces[1].end, 12);
  EXPECT_EQ(index.tensors.at("scalar").numel(), 1);
}

TEST_F(IndexFileTest, AChangedByteIsFound) {
  const std::string good = to_json(example());
  for (std::size_t i = 0; i + 1 < good.size(); i += 3) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    write_file(path(), bad);
    const std::string error = testing::error_of([&] { read_index(path()); });
    // A blank between tokens may become another one: the same index.
    if (error == testing::kNoError) {
      EXPECT_EQ(to_json(read_index(path())), good) << "byte " << i;
    } else {
      EXPECT_THAT(error, HasSubstr(path().string()));
    }
  }
}

TEST_F(IndexFileTest, ATruncationIsFound) {
  const std::string good = to_json(example());
  for (std::size_t size = 0; size + 1 < good.size(); size += 7) {
    EXPECT_THAT(error_of_reading(good.substr(0, size)), HasSubstr("is no JSON object: truncated, damaged or")) << size;
  }
}

TEST_F(IndexFileTest, WhatIsNoIndexSaysSo) {
  EXPECT_THAT(testing::error_of([&] { read_index(path()); }), HasSubstr("so this is no complete checkpoint"));
  EXPECT_THAT(error_of_reading(R"({"metadata": {}, "weight_map": {}})"),
              AllOf(HasSubstr("is not the index of a Neaptide checkpoint"), HasSubstr("found none")));
  EXPECT_THAT(error_of_reading(R"({"format": "neaptide checkpoint", "version": 2})"),
              AllOf(HasSubstr("has version 2"), HasSubstr("reads version 1")));
}

TEST_F(IndexFileTest, ImpossibleValuesAreErrors) {
  EXPECT_THAT(error_of_content([](Json& c) { c["files"][0]["name"] = "../x"; }), HasSubstr("names a file '../x'"));
  EXPECT_THAT(error_of_content([](Json& c) { c["world"] = 3; }), HasSubstr("2 files of 3 ranks"));
  EXPECT_THAT(error_of_content([](Json& c) { c["tensors"]["a"]["pieces"][1][2] = 13; }),
              HasSubstr("5 to 13 of the 12"));
  EXPECT_THAT(error_of_content([](Json& c) { c["tensors"]["a"]["pieces"][1][0] = 2; }), HasSubstr("in file 2"));
  EXPECT_THAT(error_of_content([](Json& c) { c["tensors"]["a"]["pieces"].erase(0); }), HasSubstr("cover 0 of its 12"));
  EXPECT_THAT(error_of_content([](Json& c) { c["tensors"]["a"]["shape"] = {-1, 4}; }), HasSubstr("impossible shape"));
  EXPECT_THAT(error_of_content([](Json& c) {
                c["tensors"]["a"]["shape"] = {int64_t{1} << 62, 4};
              }),
              HasSubstr("impossible shape"));
  EXPECT_THAT(error_of_content([](Json& c) { c["tensors"]["a"]["dtype"] = "F4"; }), HasSubstr("dtype of 'a'"));
  EXPECT_THAT(error_of_content([](Json& c) { c.erase("state"); }), HasSubstr("is not as this program writes it"));
}

}  // namespace
}  // namespace neap::checkpoint
