// torch-free
// What happens to an error of ours on its way through somebody else's code: out of a hook that autograd called, to
// whoever began backward.
//
// A C++ caller meets what was thrown. An interpreter sits behind code that knows the errors of torch alone and would
// make a plain RuntimeError of ours, so it says once what to throw instead. Thread-safe.
#pragma once

#include "neap/base/error.h"

namespace neap {

// Throws what stands for `error` where it will be caught, or returns to let it pass as it is.
using ErrorConverter = void (*)(const Error& error);
// Process-wide; null for none.
void set_error_converter(ErrorConverter converter) noexcept;

namespace internal {
void convert_error(const Error& error);
}

// body(), called by somebody else's code.
template <class Body>
decltype(auto) at_error_boundary(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    internal::convert_error(error);
    throw;
  }
}

}  // namespace neap
