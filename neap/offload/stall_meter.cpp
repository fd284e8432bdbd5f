#include "neap/offload/stall_meter.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace neap::offload {

void StallMeter::add_wait(const device::Event& before, const device::Event& until, Bytes bytes, Begun begun) {
  add({.at = before, .until = until, .bytes = bytes, .begun = begun});
}

void StallMeter::add_point(const device::Event& at, Bytes bytes, int64_t pass, int64_t place) {
  if (current_.number.value_or(pass) != pass) current_.complete = false;
  current_.number = pass;
  add({.at = at, .bytes = bytes, .place = place});
}

void StallMeter::add(Entry entry) {
  if (current_.entries.size() < kMostEntries) {
    current_.entries.push_back(std::move(entry));
  } else {
    current_.complete = false;
  }
}

void StallMeter::end_pass(bool by_timetable) {
  if (current_.entries.empty()) return;
  current_.by_timetable = by_timetable;
  if (ended_.size() >= kMostPasses) ended_.pop_front();
  ended_.push_back(std::exchange(current_, {}));
}

std::optional<PassTimes> StallMeter::next_pass() {
  if (ended_.empty()) return std::nullopt;
  const auto& entries = ended_.front().entries;
  const auto last_wait =
      std::find_if(entries.rbegin(), entries.rend(), [](const Entry& e) { return !e.until.is_null(); });
  if (!entries.back().at.query() || (last_wait != entries.rend() && !last_wait->until.query())) return std::nullopt;
  Pass pass = std::move(ended_.front());
  ended_.pop_front();
  PassTimes times = read(pass);
  // The memory serves the next pass.
  pass.entries.clear();
  if (current_.entries.capacity() == 0) current_.entries.swap(pass.entries);
  return times;
}

PassTimes StallMeter::read(const Pass& pass) {
  PassTimes times{.pass = pass.number.value_or(0), .complete = pass.complete, .by_timetable = pass.by_timetable};
  const device::Event& first = pass.entries.front().at;
  int64_t stalled_ns = 0;
  try {
    for (const Entry& entry : pass.entries) {
      if (entry.until.is_null()) {
        const int64_t at_ns = device::Event::elapsed_ns_of_passed(first, entry.at);
        times.points.push_back({entry.place, entry.bytes, at_ns - stalled_ns});
        continue;
      }
      const int64_t waited_ns = device::Event::elapsed_ns_of_passed(entry.at, entry.until);
      stalled_ns += std::max<int64_t>(0, waited_ns);
      if (entry.begun == Begun::kAhead) times.waits.add(waited_ns, entry.bytes);
    }
    times.waits.span_ns = device::Event::elapsed_ns_of_passed(first, pass.entries.back().at);
  } catch (const std::exception&) {
    // Several compute streams, one of them behind: nothing is learned from this pass.
    return {.complete = false, .by_timetable = pass.by_timetable};
  }
  exposed_ns_ += stalled_ns;
  return times;
}

int64_t StallMeter::take_exposed_ns() { return std::exchange(exposed_ns_, 0); }

void LinkRate::add(device::Event begin, device::Event end, Bytes bytes) {
  // The largest copy tells most about the link; the latency weighs least in it.
  if (!largest_ || bytes > largest_->bytes) largest_ = Sample{std::move(begin), std::move(end), bytes};
}

std::optional<double> LinkRate::ns_per_byte() {
  if (largest_) {
    if (const auto took = device::Event::elapsed_ns(largest_->begin, largest_->end)) {
      if (*took > 0) ns_per_byte_ = static_cast<double>(*took) / static_cast<double>(largest_->bytes.count);
      largest_.reset();
    }
  }
  return ns_per_byte_;
}

}  // namespace neap::offload
