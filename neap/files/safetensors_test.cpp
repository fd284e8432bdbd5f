// torch-free
#include "neap/files/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "neap/base/error.h"
#include "testing/error_of.h"
#include "testing/nested_json.h"

namespace neap::files {
namespace {

using ::testing::HasSubstr;

class Safetensors : public ::testing::Test {
 protected:
  Safetensors() : dir_(std::filesystem::temp_directory_path() / ("neap_safetensors_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(dir_);
  }
  ~Safetensors() override { std::filesystem::remove_all(dir_); }

  std::filesystem::path path() const { return dir_ / "x.safetensors"; }

  void write_raw(const std::string& header, const std::string& body) { write_raw(header.size(), header + body); }
  void write_raw(uint64_t length, const std::string& rest) {
    std::ofstream file(path(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << rest;
  }
  std::string error_of_opening() {
    const std::string text = testing::error_of([&] { SafetensorsFile file(path()); });
    EXPECT_THAT(text, HasSubstr(path().string()));
    return text;
  }

  std::filesystem::path dir_;
};

std::vector<float> floats(const SafetensorsFile& file, std::size_t index) {
  std::vector<float> values(file.bytes(index).size() / sizeof(float));
  std::memcpy(values.data(), file.bytes(index).data(), file.bytes(index).size());
  return values;
}

TEST_F(Safetensors, ReadingCopiesTheBytesAndNoticesAFileThatHasBecomeShorter) {
  write_raw(
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
      "abcde");
  const SafetensorsFile file(path());
  std::string b(2, ' ');
  file.read(1, std::as_writable_bytes(std::span(b)));
  EXPECT_EQ(b, "de");
  std::filesystem::resize_file(path(), std::filesystem::file_size(path()) - 1);
  EXPECT_THAT(testing::error_of([&] { file.read(1, std::as_writable_bytes(std::span(b))); }),
              HasSubstr("has become shorter while it was read"));
}

TEST_F(Safetensors, ReadsWhatWasWritten) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> b = {-1};
  {
    SafetensorsWriter writer(
        path(), {{"a", SafeType::kF32, {2, 3}, 0}, {"none", SafeType::kBF16, {0, 4}, 0}, {"b", SafeType::kI64, {}, 0}},
        {{"format", "pt"}});
    writer.append(std::as_bytes(std::span(a)));
    writer.append({});
    writer.append(std::as_bytes(std::span(b)));
    EXPECT_FALSE(std::filesystem::exists(path())) << "must not appear before it is whole";
    writer.finish();
  }
  const SafetensorsFile file(path());
  ASSERT_EQ(file.tensors().size(), 3);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (std::size_t i = 0; i < 3; ++i) {
    const SafeTensorInfo& info = file.tensors()[i];
    if (info.name == "a") {
      EXPECT_EQ(info.shape, (std::vector<int64_t>{2, 3}));
      EXPECT_EQ(floats(file, i), a);
    } else if (info.name == "b") {
      EXPECT_EQ(info.type, SafeType::kI64);
      EXPECT_TRUE(info.shape.empty());
      EXPECT_EQ(std::memcmp(file.bytes(i).data(), b.data(), 8), 0);
    } else {
      EXPECT_EQ(info.bytes, 0);
    }
  }
}

TEST_F(Safetensors, AWriterThatIsNotFinishedLeavesTheOldFileAndNoOther) {
  write_raw("{}", "");
  {
    SafetensorsWriter writer(path(), {{"a", SafeType::kF32, {1}, 0}});
    const float x = 1;
    writer.append(std::as_bytes(std::span(&x, 1)));
  }
  EXPECT_TRUE(SafetensorsFile(path()).tensors().empty());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_), {}), 1);
}

TEST_F(Safetensors, AWriterChecksItsCaller) {
  SafetensorsWriter writer(path(), {{"a", SafeType::kF32, {2}, 0}});
  const float x = 1;
  EXPECT_THROW(writer.append(std::as_bytes(std::span(&x, 1))), InternalError);
  EXPECT_THROW(writer.finish(), InternalError);
}

TEST_F(Safetensors, EveryTruncationOfAFileIsAnError) {
  {
    SafetensorsWriter writer(path(), {{"a", SafeType::kF32, {3}, 0}});
    const std::vector<float> a = {1, 2, 3};
    writer.append(std::as_bytes(std::span(a)));
    writer.finish();
  }
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path()));
  for (int64_t kept = size - 1; kept >= 0; --kept) {
    std::filesystem::resize_file(path(), static_cast<std::uintmax_t>(kept));
    EXPECT_THAT(error_of_opening(), HasSubstr("truncated")) << kept;
  }
}

TEST_F(Safetensors, GarbageIsAnErrorThatSaysWhatIsWrong) {
  EXPECT_THAT(error_of_opening(), HasSubstr("No such file"));
  write_raw(uint64_t{1} << 60, "garbage");
  EXPECT_THAT(error_of_opening(), HasSubstr("claims a header"));
  write_raw("{\"a\": ", "");
  EXPECT_THAT(error_of_opening(), HasSubstr("not a JSON object"));
  write_raw("[1, 2]", "");
  EXPECT_THAT(error_of_opening(), HasSubstr("not a JSON object"));
  write_raw(R"({"a": {"dtype": "F32", "shape": [1]}})", "1234");
  EXPECT_THAT(error_of_opening(), HasSubstr("describes tensor 'a' wrongly"));
  write_raw(R"({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})", "1");
  EXPECT_THAT(error_of_opening(), HasSubstr("F8_E4M3"));
  write_raw("{\"a\": " + testing::nested_json(1'000'000) + "}", "");
  EXPECT_THAT(error_of_opening(), HasSubstr("not a JSON object"));
}

TEST_F(Safetensors, OffsetsThatDoNotFitAreErrors) {
  write_raw(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})", "1234");
  EXPECT_THAT(error_of_opening(), HasSubstr("do not fit its shape [2] of F32"));
  write_raw(R"({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}})", "1234");
  EXPECT_THAT(error_of_opening(), HasSubstr("do not fit"));
  write_raw(R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}})", "");
  EXPECT_THAT(error_of_opening(), HasSubstr("do not fit")) << "a product that overflows to zero";
  const std::string b = R"(, "b": {"dtype": "U8", "shape": [2], "data_offsets": )";
  const std::string a = R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]})";
  write_raw(a + b + "[1, 3]}}", "123");
  EXPECT_THAT(error_of_opening(), HasSubstr("overlap"));
  write_raw(a + b + "[3, 5]}}", "12345");
  EXPECT_THAT(error_of_opening(), HasSubstr("gap"));
  write_raw(R"({"a": {"dtype": "U8", "shape": [9223372036854775807], "data_offsets": [0, 9223372036854775807]}})", "");
  EXPECT_THAT(error_of_opening(), HasSubstr("truncated"));
  write_raw(a + b + "[2, 4]}}", "12345");
  EXPECT_THAT(error_of_opening(), HasSubstr("bytes after its last tensor"));
}

TEST_F(Safetensors, AFolderThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(SafetensorsWriter("/nowhere/at/all.safetensors", {}), UserError);
}

}  // namespace
}  // namespace neap::files
