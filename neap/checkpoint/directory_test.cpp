// torch-free
#include "neap/checkpoint/directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/log.h"
#include "neap/checkpoint/index.h"
#include "neap/checkpoint/test_support.h"
#include "testing/error_of.h"

namespace neap::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

struct Checkpoints : ::testing::Test {
  fs::path add(const std::string& name, bool complete = true) {
    const fs::path path = temporary.path() / name;
    fs::create_directories(path);
    if (complete) write_file(path / kIndexName, "{}");
    return path;
  }
  std::vector<std::string> names() {
    std::vector<std::string> out;
    for (const fs::path& path : complete_checkpoints(temporary.path())) out.push_back(path.filename().string());
    return out;
  }

  TemporaryDirectory temporary;
  std::string log;
  LogSink before = set_log_sink([this](LogLevel, const std::string& text) { log += text + "\n"; });
  ~Checkpoints() override { set_log_sink(before); }
};

TEST_F(Checkpoints, StandInTheOrderOfTheirSteps) {
  add(step_name(100));
  add(step_name(20));
  add(step_name(1'234'567'890));
  add("other");
  add("step-x");
  add(".step-00000300.partial");
  EXPECT_THAT(names(), ElementsAre("step-00000020", "step-00000100", "step-1234567890"));
  EXPECT_EQ(newest_checkpoint(temporary.path()), temporary.path() / "step-1234567890");
  EXPECT_TRUE(log.empty()) << log;
}

TEST_F(Checkpoints, WithoutAnIndexArePassedOverAndNamed) {
  add(step_name(10));
  add(step_name(20), /*complete=*/false);
  EXPECT_THAT(names(), ElementsAre("step-00000010"));
  EXPECT_THAT(log, HasSubstr("step-00000020 is passed over: it has no index.json"));
}

TEST_F(Checkpoints, AreFoundByTheirOwnPathAndByThatOfTheirDirectory) {
  const fs::path older = add(step_name(10));
  const fs::path newer = add(step_name(20));
  EXPECT_EQ(checkpoint_at(older), older);
  EXPECT_EQ(checkpoint_at(temporary.path()), newer);
  EXPECT_THAT(testing::error_of([&] { checkpoint_at(temporary.path() / "none"); }), HasSubstr("found nothing"));
  const fs::path empty = add("empty", /*complete=*/false);
  EXPECT_THAT(testing::error_of([&] { checkpoint_at(empty); }), HasSubstr("found neither index.json nor a directory"));
  EXPECT_THAT(testing::error_of([&] { checkpoint_at(older / kIndexName); }), HasSubstr("found a file"));
  EXPECT_EQ(newest_checkpoint(temporary.path() / "none"), std::nullopt);
}

TEST_F(Checkpoints, BeyondTheLastFewAreRemoved) {
  for (const int64_t step : {1, 2, 3, 4}) add(step_name(step));
  add("other");
  remove_old(temporary.path(), 0, files::FileSystem::system());
  EXPECT_EQ(names().size(), 4);
  remove_old(temporary.path(), 3, files::FileSystem::system());
  EXPECT_THAT(names(), ElementsAre("step-00000002", "step-00000003", "step-00000004"));
  EXPECT_TRUE(fs::exists(temporary.path() / "other"));
}

TEST_F(Checkpoints, WhoseRemovalIsInterruptedAreWholeOrGone) {
  for (int call = 0; call < 10; ++call) {
    add(step_name(1));
    add(step_name(2));
    FailingFileSystem system(call, /*killed=*/true);
    try {
      remove_old(temporary.path(), 1, system);
    } catch (const UserError&) {
    }
    for (const fs::path& path : complete_checkpoints(temporary.path())) EXPECT_TRUE(fs::exists(path / kIndexName));
    EXPECT_EQ(log, "") << "a directory of that name without its index";
    remove_partial(temporary.path(), files::FileSystem::system());
    EXPECT_THAT(tree(temporary.path()), ::testing::Not(::testing::Contains(::testing::Key(HasSubstr("partial")))));
    if (!system.failed()) return;
  }
  FAIL() << "never came to its end";
}

}  // namespace
}  // namespace neap::checkpoint
