// torch-free
// The three kinds of error, and the two macros that raise them.
//
// UserError      the caller can mend it: a bad option, a missing file, a pattern that matches nothing.
// OutOfMemory    memory ran out; says what was asked, what was free, and the peak.
// InternalError  an invariant of Neaptide is broken: a bug of ours, to be reported.
//
// Texts follow one form: `[place] what was expected; what was found; what to do`. Thread-safe.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace neap {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class UserError : public Error {
 public:
  using Error::Error;
};

class OutOfMemory : public Error {
 public:
  using Error::Error;
};

class InternalError : public Error {
 public:
  using Error::Error;
};

namespace internal {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] void throw_user_error(const std::string& text);
[[noreturn]] void throw_internal_error(const char* file, int line, const char* condition, const std::string& text);

}  // namespace internal
}  // namespace neap

// User mistake: NEAP_CHECK(bytes <= budget, "offload: layer ", i, " needs ", bytes, "; budget is ", budget);
#define NEAP_CHECK(condition, ...)                                               \
  do {                                                                           \
    if (!(condition)) [[unlikely]]                                               \
      ::neap::internal::throw_user_error(::neap::internal::concat(__VA_ARGS__)); \
  } while (false)

#define NEAP_USER_ERROR(...) ::neap::internal::throw_user_error(::neap::internal::concat(__VA_ARGS__))

// Broken invariant: NEAP_ASSERT(refs == 0, "block ", id); the text after the condition may be left out.
#define NEAP_ASSERT(condition, ...)                                                                    \
  do {                                                                                                 \
    if (!(condition)) [[unlikely]]                                                                     \
      ::neap::internal::throw_internal_error(__FILE__, __LINE__, #condition,                           \
                                             ::neap::internal::concat("" __VA_OPT__(, ) __VA_ARGS__)); \
  } while (false)
