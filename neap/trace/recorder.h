// torch-free
// What happened, when and on which track: the one record behind `neap train --trace` and behind tests about order.
//
// A Recorder belongs to whoever wants a trace (command line, test) and is injected as a pointer that may be null; null
// means that nothing is recorded and costs one comparison. Times are nanoseconds of one clock, chosen by the owner: the
// host's steady clock or the simulator's virtual one, never both in one Recorder. Memory is bounded: what no longer
// fits is dropped, newest first, and counted.
//
// A track is named "group/lane", e.g. "device 0/out-stream": the group becomes a process, the lane a thread of the
// trace viewer. Spans of one track should not overlap except by nesting, for viewers draw them as a stack.
//
// Thread-safe. A call costs one uncontended lock and at most a few hash look-ups; names are copied once, when first
// seen.
#pragma once

#include <concepts>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_set>
#include <variant>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/base/mutex.h"

namespace neap::trace {

// A named detail of an event: {"bytes", size}, {"layer", "model.layers.3"}.
struct Arg {
  std::string_view key;
  std::variant<int64_t, double, std::string_view> value;

  template <std::integral T>
  Arg(std::string_view k, T v) : key(k), value(static_cast<int64_t>(v)) {}
  Arg(std::string_view k, double v) : key(k), value(v) {}
  Arg(std::string_view k, std::string_view v) : key(k), value(v) {}
  Arg(std::string_view k, const char* v) : Arg(k, std::string_view(v)) {}
  Arg(std::string_view k, Bytes v) : Arg(k, v.count) {}
};

enum class Kind : uint8_t { kSpan, kInstant, kCounter };

struct Event {
  Kind kind;
  uint32_t arg_count = 0;
  std::string_view track;
  std::string_view name;  // of a counter: its series
  int64_t begin_ns = 0;
  int64_t end_ns = 0;  // equals begin_ns but for spans
  double value = 0;    // counters alone
  size_t first_arg = 0;
};

// A copy of the record in the order of the calls. Its views live as long as the Recorder.
struct Snapshot {
  std::vector<Event> events;
  std::vector<Arg> args;
  int64_t dropped = 0;

  std::vector<Arg> args_of(const Event& event) const;
  // Events with this track and name; handy in tests.
  std::vector<Event> find(std::string_view track, std::string_view name) const;
};

class Recorder {
 public:
  struct Options {
    Bytes limit{256 << 20};  // about two million events with one argument each
  };

  Recorder() : Recorder(Options{}) {}
  explicit Recorder(Options options) : options_(options) {}
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // A span whose end lies before its begin is recorded with length zero.
  void span(std::string_view track, std::string_view name, int64_t begin_ns, int64_t end_ns,
            std::initializer_list<Arg> args = {}) NEAP_EXCLUDES(mutex_);
  void instant(std::string_view track, std::string_view name, int64_t at_ns, std::initializer_list<Arg> args = {})
      NEAP_EXCLUDES(mutex_);
  // A stepwise curve; viewers draw one per (group, series). A value that is not finite counts as dropped.
  void counter(std::string_view track, std::string_view series, int64_t at_ns, double value) NEAP_EXCLUDES(mutex_);

  Snapshot snapshot() const NEAP_EXCLUDES(mutex_);
  int64_t dropped() const NEAP_EXCLUDES(mutex_);
  Bytes used() const NEAP_EXCLUDES(mutex_);
  // Forgets events and the dropped count. Names stay: views of earlier snapshots remain valid.
  void clear() NEAP_EXCLUDES(mutex_);

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
  };

  void add(Event event, std::initializer_list<Arg> args) NEAP_EXCLUDES(mutex_);
  // The lasting copy of `text`, or nothing in `stored` (and false) when it does not fit.
  bool intern(std::string_view text, std::string_view& stored) NEAP_REQUIRES(mutex_);
  bool take(size_t bytes) NEAP_REQUIRES(mutex_);

  const Options options_;
  mutable Mutex mutex_;
  std::unordered_set<std::string, Hash, std::equal_to<>> names_ NEAP_GUARDED_BY(mutex_);
  // Deques grow without moving what they hold: no pause while a long trace is copied.
  std::deque<Event> events_ NEAP_GUARDED_BY(mutex_);
  std::deque<Arg> args_ NEAP_GUARDED_BY(mutex_);
  size_t name_bytes_ NEAP_GUARDED_BY(mutex_) = 0;
  size_t used_ NEAP_GUARDED_BY(mutex_) = 0;
  int64_t dropped_ NEAP_GUARDED_BY(mutex_) = 0;
};

}  // namespace neap::trace
