// A save that fails, or whose process is killed, at any of its calls of the file system.
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/log.h"
#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/checkpoint/saver.h"
#include "neap/checkpoint/test_support.h"
#include "neap/comm/world.h"
#include "testing/matchers.h"
#include "testing/ranks.h"

namespace neap::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::bit_equal;

struct Case {
  bool killed;
  bool asynchronous;
  int ranks;
  int victim;  // whose file system fails
  bool same_step;
};

std::vector<Piece> pieces(int value) {
  return {whole("a", at::full({5, 5}, value, at::kFloat)), whole("b", at::full({2}, value, at::kDouble))};
}

struct Interruption : ::testing::TestWithParam<Case> {
  fs::path dir() const { return temporary.path(); }

  // Whether the victim's file system came to its failure.
  bool save(int value, int64_t step, int fail_at) {
    std::atomic<bool> failed{false};
    testing::run_ranks(GetParam().ranks, [&](comm::World& world) {
      FailingFileSystem system(world.rank() == GetParam().victim ? fail_at : FailingFileSystem::kNever,
                               GetParam().killed);
      try {
        Saver saver(dir(), {.keep_last = 2, .asynchronous = GetParam().asynchronous, .system = &system}, &world);
        saver.save(step, pieces(value), {{"value", std::to_string(value)}});
        saver.finish();
      } catch (const UserError& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("injected"));
      }
      if (system.failed()) failed = true;
    });
    return failed;
  }

  // The value of the newest checkpoint, which is whole.
  int newest() {
    Reader reader(newest_checkpoint(dir()).value());
    reader.verify();
    const int value = std::stoi(reader.state("value"));
    EXPECT_TRUE(bit_equal(reader.tensor("a"), at::full({5, 5}, value, at::kFloat)));
    EXPECT_TRUE(bit_equal(reader.tensor("b"), at::full({2}, value, at::kDouble)));
    return value;
  }

  TemporaryDirectory temporary;
  // An old checkpoint that could not be removed is a warning.
  LogSink before = set_log_sink([](LogLevel, const std::string&) {});
  ~Interruption() override { set_log_sink(before); }
};

TEST_P(Interruption, LeavesTheCheckpointBeforeOrTheNewOneWhole) {
  save(1, 5, FailingFileSystem::kNever);
  save(2, 10, FailingFileSystem::kNever);
  int before = 2, kept = 0, made = 0;
  for (int fail_at = 0;; ++fail_at) {
    SCOPED_TRACE(fail_at);
    ASSERT_LT(fail_at, 60) << "never came to its end";
    const int value = before + 1;
    const bool failed = save(value, GetParam().same_step ? 10 : 10 + value, fail_at);
    const int found = newest();
    EXPECT_TRUE(found == before || found == value) << found;
    (found == before ? kept : made) += 1;
    before = found;
    if (!failed) {
      EXPECT_EQ(found, value);
      break;
    }
  }
  // Early failures keep the old one; the one run without a failure, and failures after the rename, have the new one.
  EXPECT_GT(kept, GetParam().victim == 0 ? 5 : 3);
  EXPECT_GE(made, 1);
  EXPECT_LE(std::distance(fs::directory_iterator(dir()), {}), 2) << "leftovers";
}

INSTANTIATE_TEST_SUITE_P(AtEveryCall, Interruption,
                         ::testing::Values(Case{false, false, 1, 0, false}, Case{true, false, 1, 0, false},
                                           Case{false, true, 1, 0, true}, Case{true, true, 1, 0, true},
                                           Case{true, false, 2, 0, false}, Case{true, true, 2, 1, false}));

}  // namespace
}  // namespace neap::checkpoint
