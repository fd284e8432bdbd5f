// torch-free
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/base/error.h"
#include "neap/base/error_boundary.h"
#include "neap/base/json_text.h"
#include "neap/base/log.h"
#include "neap/base/mutex.h"
#include "neap/base/scope_exit.h"
#include "testing/error_of.h"

namespace neap {
namespace {

using namespace neap::literals;
using ::testing::HasSubstr;

TEST(Error, CheckThrowsAUserErrorWithTheWholeText) {
  EXPECT_EQ(testing::error_of([] { NEAP_CHECK(1 > 2, "[place] expected ", 1, "; found ", 2_MiB); }),
            "[place] expected 1; found 2.00 MiB");
  EXPECT_THROW(NEAP_CHECK(false, "x"), UserError);
}

TEST(Error, AssertThrowsAnInternalErrorThatNamesPlaceAndCondition) {
  const std::string text = testing::error_of<InternalError>([] { NEAP_ASSERT(1 > 2, "block ", 7); });
  EXPECT_THAT(text, HasSubstr("base_test.cpp:"));
  EXPECT_THAT(text, HasSubstr("1 > 2; block 7"));
  EXPECT_THROW(NEAP_ASSERT(false), InternalError);
}

// What an interpreter would want to be thrown.
struct Converted {
  std::string text;
  bool users;
};

TEST(Error, ComesOutOfSomebodyElsesCodeAsWhatTheyKnow) {
  const auto raise = [] { at_error_boundary([] { NEAP_USER_ERROR("[place] expected 1"); }); };
  EXPECT_THROW(raise(), UserError);
  const ScopeExit reset([] { set_error_converter(nullptr); });
  set_error_converter([](const Error& error) {
    throw Converted{error.what(), dynamic_cast<const UserError*>(&error) != nullptr};
  });
  try {
    raise();
    ADD_FAILURE() << "not thrown";
  } catch (const Converted& found) {
    EXPECT_EQ(found.text, "[place] expected 1");
    EXPECT_TRUE(found.users);
  }
  EXPECT_EQ(at_error_boundary([] { return 3; }), 3);
  EXPECT_THROW(at_error_boundary([] { throw std::runtime_error("not ours"); }), std::runtime_error);
  set_error_converter([](const Error&) {});  // it may leave some alone
  EXPECT_THROW(raise(), UserError);
}

// Stands for the interpreter's lock: a second mutex that whoever waits for ours must not hold.
struct OtherLock {
  static inline std::mutex mutex;
  static inline thread_local bool held = false;
  static inline std::atomic<int> released = 0;
  static void take() {
    mutex.lock();
    held = true;
  }
  static void give() {
    held = false;
    mutex.unlock();
  }
  static void* release() {
    if (!held) return nullptr;
    give();
    ++released;
    return &mutex;
  }
  static void retake(void* /*released*/) { take(); }
  static constexpr WaitHooks kHooks{&release, &retake};
};

TEST(Mutex, WhoWaitsForItLetsGoOfTheInterpretersLockMeanwhile) {
  set_wait_hooks(&OtherLock::kHooks);
  Mutex mutex;
  std::atomic<bool> holds = false;
  std::thread holder([&] {
    const MutexLock lock(mutex);
    holds = true;
    while (OtherLock::released == 0) std::this_thread::yield();
    OtherLock::take();  // would wait for ever if the other thread kept it
    OtherLock::give();
  });
  while (!holds) std::this_thread::yield();
  OtherLock::take();
  {
    const MutexLock lock(mutex);
    EXPECT_TRUE(OtherLock::held);
  }
  {
    const MutexLock lock(mutex);  // free: nothing is given up
    EXPECT_EQ(OtherLock::released, 1);
  }
  OtherLock::give();
  holder.join();
  set_wait_hooks(nullptr);
}

TEST(CondVar, WhoWaitsForItLetsGoOfTheInterpretersLockMeanwhile) {
  set_wait_hooks(&OtherLock::kHooks);
  Mutex mutex;
  CondVar changed;
  bool ready = false;
  std::thread other([&] {
    OtherLock::take();
    const MutexLock lock(mutex);
    ready = true;
    changed.notify_one();
    OtherLock::give();
  });
  OtherLock::take();
  {
    const MutexLock lock(mutex);
    changed.wait(mutex, [&] { return ready; });
    EXPECT_TRUE(OtherLock::held);
  }
  OtherLock::give();
  other.join();
  set_wait_hooks(nullptr);
}

TEST(Bytes, ArePrintedInTheLargestFittingUnit) {
  EXPECT_EQ(to_string(0_B), "0 B");
  EXPECT_EQ(to_string(1023_B), "1023 B");
  EXPECT_EQ(to_string(1536_KiB), "1.50 MiB");
  EXPECT_EQ(to_string(Bytes(-(2 << 20))), "-2.00 MiB");
}

TEST(Bytes, AreParsedWithAndWithoutUnits) {
  EXPECT_EQ(parse_bytes("0", "x"), 0_B);
  EXPECT_EQ(parse_bytes("4096", "x"), 4_KiB);
  EXPECT_EQ(parse_bytes(" 1.5 GiB ", "x"), 1536_MiB);
  EXPECT_EQ(parse_bytes("2GB", "x"), Bytes(2'000'000'000));
}

TEST(Bytes, BadTextIsAUserErrorThatNamesOptionAndValue) {
  for (const char* bad : {"", "GiB", "-1", "nan", "inf", "12 parsecs", "1e30GiB", "1GiB2"}) {
    const std::string text = testing::error_of([&] { parse_bytes(bad, "offload.device_budget"); });
    EXPECT_THAT(text, HasSubstr("offload.device_budget"));
    EXPECT_THAT(text, HasSubstr(std::string("'") + bad + "'"));
  }
}

TEST(JsonText, IsNoFurtherReadWhereItNestsTooDeeply) {
  EXPECT_FALSE(nests_deeper(R"({"a": [[1], "]]]", "\"[[[[", "\\"], "b": {"c": []}})", 3));
  EXPECT_TRUE(nests_deeper(R"({"a": [[1], [{"b": 1}]]})", 3));
  EXPECT_FALSE(nests_deeper(R"([[1], [2], [3], [4], [5]])", 2));
  EXPECT_FALSE(nests_deeper(R"("\)", 0));
}

TEST(Log, GoesToTheInstalledSink) {
  std::vector<std::string> seen;
  LogSink former = set_log_sink(
      [&](LogLevel level, const std::string& text) { seen.push_back(std::to_string(static_cast<int>(level)) + text); });
  log_warning("kept ", 3, " tensors");
  set_log_sink(std::move(former));
  EXPECT_EQ(seen, std::vector<std::string>{"2kept 3 tensors"});
}

TEST(Log, WaitsUntilTheOutermostThatHoldsItHasGone) {
  std::vector<std::string> seen;
  LogSink former = set_log_sink([&](LogLevel /*level*/, const std::string& text) { seen.push_back(text); });
  {
    const HoldMessages outer;
    log_info("first");
    {
      const HoldMessages inner;
      log_info("second");
    }
    std::thread([] { log_info("another thread's"); }).join();
    EXPECT_EQ(seen, std::vector<std::string>{"another thread's"});
  }
  set_log_sink(std::move(former));
  EXPECT_EQ(seen, (std::vector<std::string>{"another thread's", "first", "second"}));
}

TEST(Mutex, ACondVarHandsTheLockBack) {
  Mutex mutex;
  CondVar condition;
  bool ready = false;
  std::thread setter([&] {
    const MutexLock lock(mutex);
    ready = true;
    condition.notify_one();
  });
  {
    const MutexLock lock(mutex);
    EXPECT_TRUE(condition.wait_for(mutex, std::chrono::seconds(60), [&] { return ready; }));
    EXPECT_FALSE(condition.wait_for(mutex, std::chrono::nanoseconds(1), [] { return false; }));
  }
  setter.join();
}

TEST(ScopeExit, RunsOnceUnlessDismissed) {
  int runs = 0;
  {
    ScopeExit on_exit([&] { ++runs; });
  }
  {
    ScopeExit on_exit([&] { ++runs; });
    on_exit.dismiss();
  }
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace neap
