// torch-free
#include "neap/offload/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::offload {
namespace {

using namespace neap::literals;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

TEST(Options, DefaultsAreValid) {
  EXPECT_NO_THROW(validate(Options{}));
  EXPECT_NO_THROW(validate(Options{}, 1));
}

TEST(Options, ANegativeSizeNamesOptionValueAndRange) {
  EXPECT_THAT(error_of([] { validate({.device_budget = Bytes(-1)}); }),
              AllOf(HasSubstr("[offload.device_budget]"), HasSubstr("0 or more"), HasSubstr("found -1")));
  EXPECT_THAT(error_of([] { validate({.min_bytes = Bytes(-2)}); }), HasSubstr("[offload.min_bytes]"));
  EXPECT_THAT(error_of([] { validate({.prefetch = Bytes(-3)}); }), HasSubstr("[offload.prefetch]"));
  EXPECT_THAT(error_of([] { validate({.max_in_flight = Bytes(-4)}); }), HasSubstr("[offload.max_in_flight]"));
  EXPECT_THAT(error_of([] { validate({.host_cache_limit = Bytes(-5)}); }), HasSubstr("[offload.host_cache_limit]"));
  EXPECT_THAT(error_of([] { validate({.device_limit = Bytes(-6)}); }), HasSubstr("[offload.device_limit]"));
  EXPECT_THAT(error_of([] { validate({.host_limit = Bytes(-6)}); }), HasSubstr("[offload.host_limit]"));
}

TEST(Options, NegativeCountsAndUnknownModesAreErrors) {
  EXPECT_THAT(error_of([] { validate({.keep_last = -1}); }), HasSubstr("[offload.keep_last]"));
  EXPECT_THAT(error_of([] { validate({.prefetch = Layers{-1}}); }), HasSubstr("[offload.prefetch]"));
  EXPECT_THAT(error_of([] { validate({.mode = static_cast<Mode>(7)}); }), HasSubstr("[offload.mode]"));
}

TEST(Options, PrefetchIsSmallerThanTheNumberOfUnits) {
  EXPECT_NO_THROW(validate({.prefetch = Layers{3}}, 4));
  EXPECT_THAT(error_of([] { validate({.prefetch = Layers{4}}, 4); }), AllOf(HasSubstr("0 to 3"), HasSubstr("found 4")));
  EXPECT_THAT(error_of([] { validate({.keep_last = 5}, 4); }), AllOf(HasSubstr("0 to 4"), HasSubstr("found 5")));
}

TEST(Options, ZeroIsAValueOfItsOwn) {
  EXPECT_NO_THROW(validate({.device_budget = 0_B,
                            .min_bytes = 0_B,
                            .prefetch = 0_B,
                            .keep_last = 0,
                            .max_in_flight = 0_B,
                            .host_cache_limit = 0_B,
                            .host_limit = 0_B}));
}

TEST(Options, ModesHaveNames) {
  for (const Mode mode : {Mode::kAsync, Mode::kSync, Mode::kOff}) EXPECT_EQ(parse_mode(to_string(mode)), mode);
  EXPECT_THAT(error_of([] { parse_mode("Async"); }), AllOf(HasSubstr("[offload.mode]"), HasSubstr("'Async'")));
}

TEST(Options, PrefetchIsReadFromText) {
  EXPECT_EQ(parse_prefetch("automatic"), Prefetch(Automatic{}));
  EXPECT_EQ(parse_prefetch("2"), Prefetch(Layers{2}));
  EXPECT_EQ(parse_prefetch("0"), Prefetch(Layers{0}));
  EXPECT_EQ(parse_prefetch("64MiB"), Prefetch(64_MiB));
  for (const char* bad : {"", "-1", "nan", "1.5", "99999999999999999999", "auto", "nanMiB", "-1MiB", "1e30GiB"})
    EXPECT_THAT(error_of([&] { parse_prefetch(bad, "run.prefetch"); }), HasSubstr("[run.prefetch]")) << bad;
  EXPECT_EQ(to_string(Prefetch(Layers{2})), "2 layers");
  EXPECT_EQ(to_string(Prefetch(64_MiB)), "64.00 MiB");
  EXPECT_EQ(to_string(Prefetch(Automatic{})), "automatic");
}

}  // namespace
}  // namespace neap::offload
