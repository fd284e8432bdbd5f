#include "neap/trace/recorder.h"

#include <algorithm>
#include <cmath>

namespace neap::trace {
namespace {

// What the hash set spends on a name besides its characters: node, bucket and string header.
constexpr size_t kNameOverhead = 64;

}  // namespace

std::vector<Arg> Snapshot::args_of(const Event& event) const {
  const auto first = args.begin() + static_cast<std::ptrdiff_t>(event.first_arg);
  return {first, first + event.arg_count};
}

std::vector<Event> Snapshot::find(std::string_view track, std::string_view name) const {
  std::vector<Event> found;
  std::copy_if(events.begin(), events.end(), std::back_inserter(found),
               [&](const Event& event) { return event.track == track && event.name == name; });
  return found;
}

void Recorder::span(std::string_view track, std::string_view name, int64_t begin_ns, int64_t end_ns,
                    std::initializer_list<Arg> args) {
  add({.kind = Kind::kSpan, .track = track, .name = name, .begin_ns = begin_ns, .end_ns = std::max(begin_ns, end_ns)},
      args);
}

void Recorder::instant(std::string_view track, std::string_view name, int64_t at_ns, std::initializer_list<Arg> args) {
  add({.kind = Kind::kInstant, .track = track, .name = name, .begin_ns = at_ns, .end_ns = at_ns}, args);
}

void Recorder::counter(std::string_view track, std::string_view series, int64_t at_ns, double value) {
  if (!std::isfinite(value)) {  // neither JSON nor a viewer has a place for it
    const MutexLock lock(mutex_);
    ++dropped_;
    return;
  }
  add({.kind = Kind::kCounter, .track = track, .name = series, .begin_ns = at_ns, .end_ns = at_ns, .value = value}, {});
}

void Recorder::add(Event event, std::initializer_list<Arg> args) {
  const MutexLock lock(mutex_);
  const size_t args_before = args_.size();
  event.first_arg = args_before;
  event.arg_count = static_cast<uint32_t>(args.size());
  bool fits = intern(event.track, event.track) && intern(event.name, event.name) &&
              take(sizeof(Event) + args.size() * sizeof(Arg));
  for (auto arg = args.begin(); fits && arg != args.end(); ++arg) {
    Arg stored = *arg;
    fits = intern(arg->key, stored.key);
    if (auto* text = std::get_if<std::string_view>(&stored.value)) fits = fits && intern(*text, *text);
    if (fits) args_.push_back(stored);
  }
  if (fits) {
    events_.push_back(event);
  } else {
    args_.resize(args_before, Arg("", int64_t{0}));
    ++dropped_;
  }
}

bool Recorder::intern(std::string_view text, std::string_view& stored) {
  auto found = names_.find(text);
  if (found == names_.end()) {
    if (!take(text.size() + kNameOverhead)) return false;
    name_bytes_ += text.size() + kNameOverhead;
    found = names_.emplace(text).first;
  }
  stored = *found;
  return true;
}

bool Recorder::take(size_t bytes) {
  if (used_ + bytes > static_cast<size_t>(options_.limit.count)) return false;
  used_ += bytes;
  return true;
}

Snapshot Recorder::snapshot() const {
  const MutexLock lock(mutex_);
  return {{events_.begin(), events_.end()}, {args_.begin(), args_.end()}, dropped_};
}

int64_t Recorder::dropped() const {
  const MutexLock lock(mutex_);
  return dropped_;
}

Bytes Recorder::used() const {
  const MutexLock lock(mutex_);
  return Bytes(static_cast<int64_t>(used_));
}

void Recorder::clear() {
  const MutexLock lock(mutex_);
  events_.clear();
  args_.clear();
  used_ = name_bytes_;
  dropped_ = 0;
}

}  // namespace neap::trace
