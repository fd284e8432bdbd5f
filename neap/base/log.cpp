#include "neap/base/log.h"

#include <cstdio>
#include <utility>

#include "neap/base/mutex.h"

namespace neap {
namespace {

struct SinkSlot {
  Mutex mutex;
  LogSink sink NEAP_GUARDED_BY(mutex);
};

constinit thread_local HoldMessages* t_holding = nullptr;

// Leaked on purpose: destructors of static objects may still log.
SinkSlot& slot() {
  static auto* slot = new SinkSlot;
  return *slot;
}

void write_to_stderr(LogLevel level, const std::string& text) {
  constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  if (level != LogLevel::kDebug) std::fprintf(stderr, "neap %s: %s\n", kNames[static_cast<int>(level)], text.c_str());
}

}  // namespace

LogSink set_log_sink(LogSink sink) {
  const MutexLock lock(slot().mutex);
  return std::exchange(slot().sink, std::move(sink));
}

HoldMessages::HoldMessages() noexcept : outer_(std::exchange(t_holding, this)) {}

HoldMessages::~HoldMessages() {
  t_holding = outer_;
  for (const auto& [level, text] : held_) log(level, text);
}

void log(LogLevel level, const std::string& text) {
  if (t_holding != nullptr) {
    t_holding->held_.emplace_back(level, text);
    return;
  }
  LogSink sink;
  {
    const MutexLock lock(slot().mutex);
    sink = slot().sink;  // called outside the lock: a sink may log
  }
  sink ? sink(level, text) : write_to_stderr(level, text);
}

}  // namespace neap
