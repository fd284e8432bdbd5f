// torch-free
// Where the library's messages go. The library prints nothing itself: it calls the installed sink, which by default
// writes to standard error. Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/error.h"

namespace neap {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogSink = std::function<void(LogLevel, const std::string&)>;

// Replaces the sink and returns the former one. An empty function restores the default (standard error, from kInfo on).
LogSink set_log_sink(LogSink sink);

void log(LogLevel level, const std::string& text);

// While it lives, what its thread logs waits; then it goes to the sink. For whoever holds a lock: a sink may run any
// code, and that may come back for the same lock. May nest. REQUIRES: destroyed on the thread that made it.
class HoldMessages {
 public:
  HoldMessages() noexcept;
  ~HoldMessages();
  HoldMessages(const HoldMessages&) = delete;
  HoldMessages& operator=(const HoldMessages&) = delete;

 private:
  friend void log(LogLevel level, const std::string& text);

  std::vector<std::pair<LogLevel, std::string>> held_;
  HoldMessages* const outer_;
};

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
