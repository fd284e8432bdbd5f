#include "neap/base/error.h"

#include <cstring>

namespace neap::internal {

void throw_user_error(const std::string& text) { throw UserError(text); }

void throw_internal_error(const char* file, int line, const char* condition, const std::string& text) {
  const char* name = std::strrchr(file, '/');
  throw InternalError(concat("[", name == nullptr ? file : name + 1, ":", line, "] broken invariant: ", condition,
                             text.empty() ? "" : "; ", text, "; please report this as a bug of Neaptide"));
}

}  // namespace neap::internal
