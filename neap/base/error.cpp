#include "neap/base/error.h"

#include <atomic>
#include <cstring>

#include "neap/base/error_boundary.h"

namespace neap {
namespace {

constinit std::atomic<ErrorConverter> g_converter = nullptr;

}  // namespace

void set_error_converter(ErrorConverter converter) noexcept { g_converter.store(converter, std::memory_order_release); }

namespace internal {

void convert_error(const Error& error) {
  if (const ErrorConverter converter = g_converter.load(std::memory_order_acquire)) converter(error);
}

void throw_user_error(const std::string& text) { throw UserError(text); }

void throw_internal_error(const char* file, int line, const char* condition, const std::string& text) {
  const char* name = std::strrchr(file, '/');
  throw InternalError(concat("[", name == nullptr ? file : name + 1, ":", line, "] broken invariant: ", condition,
                             text.empty() ? "" : "; ", text, "; please report this as a bug of Neaptide"));
}

}  // namespace internal
}  // namespace neap
