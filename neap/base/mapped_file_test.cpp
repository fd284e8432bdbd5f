// torch-free
#include "neap/base/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <numeric>
#include <utility>
#include <vector>

#include "testing/error_of.h"

namespace neap {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

class MappedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "neap-mapped-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::filesystem::path write(const std::string& bytes) const {
    std::ofstream(dir_ / "file", std::ios::binary) << bytes;
    return dir_ / "file";
  }

  std::filesystem::path dir_;
};

TEST_F(MappedFileTest, HasTheBytesOfTheFileAlsoAfterAMoveAndARelease) {
  std::string bytes(300'000, 'x');
  bytes[0] = 'a';
  bytes[299'999] = 'z';
  MappedFile first(write(bytes), "[test] ");
  const MappedFile file = std::move(first);
  EXPECT_EQ(first.size(), 0);
  ASSERT_EQ(file.size(), bytes.size());
  file.release(0, file.size());
  EXPECT_EQ(file.bytes().front(), std::byte{'a'});
  EXPECT_EQ(file.bytes().back(), std::byte{'z'});
  EXPECT_NO_THROW(file.check_length());
}

TEST_F(MappedFileTest, ReleasedPagesAreNotResident) {
  const std::string bytes(1 << 20, 'x');
  const MappedFile file(write(bytes), "[test] ");
  const auto resident = [&] {
    std::ifstream status("/proc/self/smaps");
    // The mapping of this file, by its name; its Rss is on the line of that name.
    bool mine = false;
    int64_t kilobytes = 0;
    for (std::string line; std::getline(status, line);) {
      if (line.find('-') < line.find(' ')) mine = line.ends_with((dir_ / "file").string());
      if (mine && line.starts_with("Rss:")) kilobytes += std::stoll(line.substr(4));
    }
    return kilobytes;
  };
  const auto touch = [&] {
    return std::accumulate(file.bytes().begin(), file.bytes().end(), 0,
                           [](int sum, std::byte byte) { return sum ^ static_cast<int>(byte); });
  };
  EXPECT_EQ(touch(), 0);
  EXPECT_EQ(resident(), 1024);
  file.release(300'000, 100);  // and what the fault around it mapped
  EXPECT_LT(resident(), 1024);
  file.release(0, file.size());
  EXPECT_EQ(resident(), 0);
  EXPECT_EQ(touch(), 0);
}

TEST_F(MappedFileTest, NothingIsReadAroundWhatIsTouchedOrAnnounced) {
  constexpr size_t kMiB = size_t{1} << 20;
  const auto path = write("");
  std::filesystem::resize_file(path, 32 * kMiB);  // holes, of which the system has no page yet
  const MappedFile file(path, "[test] ");
  const auto cached = [&](size_t place) {
    unsigned char page = 0;
    auto* address = const_cast<std::byte*>(file.bytes().data()) + place;
    EXPECT_EQ(::mincore(address, 1, &page), 0);
    return (page & 1) != 0;
  };
  const auto touch = [&](size_t begin, size_t count) {
    const auto bytes = file.bytes().subspan(begin, count);
    return std::accumulate(bytes.begin(), bytes.end(), 0,
                           [](int sum, auto byte) { return sum + static_cast<int>(byte); });
  };
  file.read_as_announced();
  EXPECT_EQ(touch(16 * kMiB, 1), 0);
  EXPECT_TRUE(cached(16 * kMiB));
  EXPECT_FALSE(cached(16 * kMiB + 8192));
  file.announce(4 * kMiB + 100, kMiB);
  EXPECT_EQ(touch(4 * kMiB + 100, kMiB), 0);
  EXPECT_TRUE(cached(5 * kMiB));
  EXPECT_FALSE(cached(5 * kMiB + 8192));
  file.announce(31 * kMiB, 2 * kMiB);  // what is beyond the end is not asked for
  EXPECT_EQ(touch(31 * kMiB, kMiB), 0);
}

TEST_F(MappedFileTest, AnEmptyFileHasNoBytes) {
  const MappedFile file(write(""), "[test] ");
  EXPECT_TRUE(file.bytes().empty());
  file.release(0, 0);
}

TEST_F(MappedFileTest, SaysWhatCannotBeMapped) {
  EXPECT_THAT(error_of([&] { MappedFile(dir_ / "none", "[data.path] none: "); }),
              HasSubstr("[data.path] none: cannot be opened: No such file"));
  EXPECT_THAT(error_of([&] { MappedFile(dir_, "[data.path] dir: "); }), HasSubstr("dir: expected a file; found"));
}

TEST_F(MappedFileTest, AFileThatShrinksIsNoticedBeforeItIsTouched) {
  const auto path = write(std::string(100, 'x'));
  const MappedFile file(path, "[data.path] corpus.bin: ");
  std::filesystem::resize_file(path, 60);
  EXPECT_THAT(error_of([&] { file.check_length(); }),
              HasSubstr("corpus.bin: the file had 100 bytes when it was opened and has 60 now"));
}

}  // namespace
}  // namespace neap
