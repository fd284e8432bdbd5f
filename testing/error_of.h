// torch-free
// The text of the error that a call ends in, for tests that read it.
//
//   EXPECT_THAT(error_of([] { parse_mode("Async"); }), HasSubstr("[offload.mode]"));
//   EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
#pragma once

#include <concepts>
#include <exception>
#include <string>
#include <utility>

#include "neap/base/error.h"

namespace neap::testing {

inline constexpr const char* kNoError = "no error";

// kNoError when the call returns. An error of another kind than `Expected` passes through and fails the test. Of
// torch's errors the text without its stack trace.
template <std::derived_from<std::exception> Expected = UserError, class Function>
std::string error_of(Function&& function) {
  try {
    std::forward<Function>(function)();
  } catch (const Expected& error) {
    if constexpr (requires { error.what_without_backtrace(); }) {
      return error.what_without_backtrace();
    } else {
      return error.what();
    }
  }
  return kNoError;
}

}  // namespace neap::testing
