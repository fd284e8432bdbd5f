// torch-free
// Where the library's messages go. The library prints nothing itself: it calls the installed sink, which by default
// writes to standard error. Thread-safe.
#pragma once

#include <functional>
#include <string>

#include "neap/base/error.h"

namespace neap {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogSink = std::function<void(LogLevel, const std::string&)>;

// Replaces the sink and returns the former one. An empty function restores the default (standard error, from kInfo on).
LogSink set_log_sink(LogSink sink);

void log(LogLevel level, const std::string& text);

template <class... Parts>
void log_info(const Parts&... parts) {
  log(LogLevel::kInfo, internal::concat(parts...));
}
template <class... Parts>
void log_warning(const Parts&... parts) {
  log(LogLevel::kWarning, internal::concat(parts...));
}
template <class... Parts>
void log_error(const Parts&... parts) {
  log(LogLevel::kError, internal::concat(parts...));
}

}  // namespace neap
