// torch-free
#include "neap/train/tensorboard_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <sstream>

#include "neap/base/error.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

template <class T>
T take(std::string_view& data) {
  T value;
  std::memcpy(&value, data.data(), sizeof value);
  data.remove_prefix(sizeof value);
  return value;
}

// The data of every record, with both checksums compared.
std::vector<std::string> records(std::string_view file) {
  std::vector<std::string> out;
  while (!file.empty()) {
    const std::string_view head = file.substr(0, 8);
    const auto size = take<uint64_t>(file);
    EXPECT_EQ(take<uint32_t>(file), internal::masked_crc32c(head));
    out.emplace_back(file.substr(0, size));
    file.remove_prefix(size);
    EXPECT_EQ(take<uint32_t>(file), internal::masked_crc32c(out.back()));
  }
  return out;
}

class TensorBoard : public ::testing::Test {
 protected:
  TensorBoard() {
    dir_ = (fs::temp_directory_path() / "neap-events-XXXXXX").string();
    EXPECT_NE(::mkdtemp(dir_.data()), nullptr);
  }
  ~TensorBoard() override { fs::remove_all(dir_); }

  std::string dir_;
};

// RFC 3720, B.4, then TensorFlow's mask.
TEST(Crc32c, IsThatOfTheStandardMasked) {
  const auto masked = [](uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8; };
  EXPECT_EQ(internal::masked_crc32c(std::string(32, '\0')), masked(0x8a9136aa));
  EXPECT_EQ(internal::masked_crc32c(std::string(32, '\xff')), masked(0x62a8ab43));
  EXPECT_EQ(internal::masked_crc32c("123456789"), masked(0xe3069283));
}

TEST_F(TensorBoard, WritesTheVersionAndThenOneEventForEachStep) {
  double now = 1000.5;
  TensorBoardFile file(dir_, 0, [&] { return now; });
  EXPECT_THAT(file.path().filename().string(), ::testing::StartsWith("events.out.tfevents.1000."));
  now = 1001;
  file.scalars(300, {{"loss", 2.5}, {"lr", 0.25}});
  const std::vector<std::string> found = records(slurp(file.path()));
  ASSERT_EQ(found.size(), 2U);
  using namespace std::string_literals;
  // wall_time 1000.5, step 0, file_version
  EXPECT_EQ(found[0], "\x09\x00\x00\x00\x00\x00\x44\x8f\x40\x10\x00\x1a\x0d"s + "brain.Event:2");
  // wall_time 1001, step 300, summary { value { tag "loss" simple_value 2.5 } value { tag "lr" simple_value 0.25 } }
  EXPECT_EQ(found[1], "\x09\x00\x00\x00\x00\x00\x48\x8f\x40\x10\xac\x02\x2a\x18"s +
                          "\x0a\x0b\x0a\x04loss\x15\x00\x00\x20\x40"s + "\x0a\x09\x0a\x02lr\x15\x00\x00\x80\x3e"s);
}

// A run that was killed after its last checkpoint left steps that are taken again.
TEST_F(TensorBoard, OfAResumedRunStepsFromBeforeAreForgotten) {
  const TensorBoardFile file(dir_, 299, [] { return 1000.5; });
  const std::vector<std::string> found = records(slurp(file.path()));
  ASSERT_EQ(found.size(), 2U);
  // wall_time 1000.5, step 300, session_log { status START }
  EXPECT_EQ(found[1], std::string("\x09\x00\x00\x00\x00\x00\x44\x8f\x40\x10\xac\x02\x3a\x02\x08\x01", 16));
}

TEST_F(TensorBoard, ADirectoryThatIsNotThereIsAUserError) {
  EXPECT_THROW(TensorBoardFile(fs::path(dir_) / "nowhere"), UserError);
}

}  // namespace
}  // namespace neap::train
