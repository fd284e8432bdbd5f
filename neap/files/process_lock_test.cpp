// torch-free
#include "neap/files/process_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <optional>
#include <string>

#include "testing/error_of.h"

namespace neap::files {
namespace {

namespace fs = std::filesystem;

// A process that runs `body`, says whether that went well, and lives on until it is killed.
class Child {
 public:
  template <class Function>
  explicit Child(Function&& body) {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    id_ = ::fork();
    if (id_ == 0) {
      testing::error_of([&] {
        body();
        EXPECT_EQ(::write(ends[1], "y", 1), 1);
        while (true) ::pause();
      });
      EXPECT_EQ(::write(ends[1], "n", 1), 1);
      ::_exit(0);
    }
    char answer = 0;
    EXPECT_EQ(::read(ends[0], &answer, 1), 1);
    went_well_ = answer == 'y';
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool went_well() const { return went_well_; }
  pid_t id() const { return id_; }
  void kill() {
    if (id_ <= 0) return;
    ::kill(id_, SIGKILL);
    ::waitpid(id_, nullptr, 0);
    id_ = 0;
  }

 private:
  pid_t id_ = 0;
  bool went_well_ = false;
};

struct ProcessLockTest : ::testing::Test {
  ProcessLockTest() { fs::create_directories(base); }
  ~ProcessLockTest() override { fs::remove_all(base); }
  std::string error() const {
    return testing::error_of([&] { const ProcessLock lock(base, "run.lock", "log.dir"); });
  }

  const fs::path base = fs::temp_directory_path() / ("neap_process_lock_" + std::to_string(::getpid()));
};

TEST_F(ProcessLockTest, NamesTheProcessThatHoldsItAndIsFreeOnceThatIsKilled) {
  std::optional<ProcessLock> lock;
  Child other([&] { lock.emplace(base, "run.lock", "log.dir"); });
  ASSERT_TRUE(other.went_well());
  EXPECT_EQ(error(), "[log.dir] expected a directory that no other process writes to; found that process " +
                         std::to_string(other.id()) + " holds " + (base / "run.lock").string() +
                         "; wait for its end, stop it, or choose another directory");
  other.kill();
  EXPECT_EQ(error(), testing::kNoError);
}

TEST_F(ProcessLockTest, ForkedChildrenDoNotKeepIt) {
  std::optional<ProcessLock> lock(std::in_place, base, "run.lock", "log.dir");
  const Child idle([] {});
  EXPECT_FALSE(Child([&] { const ProcessLock second(base, "run.lock", "log.dir"); }).went_well());
  lock.reset();
  EXPECT_TRUE(Child([&] { const ProcessLock second(base, "run.lock", "log.dir"); }).went_well());
}

TEST_F(ProcessLockTest, ADirectoryThatCannotBeWrittenIsTheUsersMatter) {
  EXPECT_THAT(testing::error_of([&] { const ProcessLock lock(base / "missing", "run.lock", "log.dir"); }),
              ::testing::HasSubstr("[log.dir] " + (base / "missing" / "run.lock").string() + " cannot be made"));
}

}  // namespace
}  // namespace neap::files
