// torch-free
#include "neap/files/atomic_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "neap/files/atomic_file.h"
#include "testing/error_of.h"

namespace neap::files {
namespace {

namespace fs = std::filesystem;

struct AtomicDirectoryTest : ::testing::Test {
  AtomicDirectoryTest() { fs::create_directories(base); }
  ~AtomicDirectoryTest() override { fs::remove_all(base); }
  std::string content() const {
    std::ifstream in(base / "d" / "file");
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  int64_t entries() const { return std::distance(fs::directory_iterator(base), {}); }

  const fs::path base = fs::temp_directory_path() / ("neap_atomic_directory_" + std::to_string(::getpid()));
};

TEST_F(AtomicDirectoryTest, AppearsAtCommitAndReplacesWhatWasThere) {
  for (const char* text : {"first", "second"}) {
    AtomicDirectory directory(base / "d" / "");  // a slash at the end changes nothing
    write_text(directory.temporary() / "file", text);
    EXPECT_NE(content(), text);
    directory.commit();
    EXPECT_EQ(content(), text);
    EXPECT_EQ(entries(), 1);
  }
}

TEST_F(AtomicDirectoryTest, WithoutACommitLeavesNothing) {
  fs::create_directories(AtomicDirectory::temporary_name(base / "d") / "of a process that died");
  {
    AtomicDirectory directory(base / "d");
    EXPECT_TRUE(fs::is_empty(directory.temporary()));
    write_text(directory.temporary() / "file", "text");
  }
  EXPECT_EQ(entries(), 0);
}

TEST_F(AtomicDirectoryTest, SaysWhereItCannotBe) {
  write_text(base / "file", "text");
  EXPECT_THAT(testing::error_of([&] { AtomicDirectory directory(base / "file" / "d"); }),
              ::testing::HasSubstr(".d.partial can be"));
}

}  // namespace
}  // namespace neap::files
