#include "neap/offload/stall_meter.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace neap::offload {

void StallMeter::add(const device::Event& before, const device::Event& until, Bytes bytes, Begun begun) {
  if (current_.size() < kMostPairs) current_.push_back({before, until, bytes, begun});
}

void StallMeter::end_pass() {
  if (current_.empty()) return;
  if (ended_.size() >= kMostPasses) ended_.pop_front();
  ended_.push_back(std::exchange(current_, {}));
}

std::optional<WaitSummary> StallMeter::next_pass() {
  if (ended_.empty()) return std::nullopt;
  const Pair& last = ended_.front().back();
  if (!last.until.query() || !last.before.query()) return std::nullopt;
  const Pass pass = std::move(ended_.front());
  ended_.pop_front();
  return read(pass);
}

WaitSummary StallMeter::read(const Pass& pass) {
  WaitSummary summary;
  try {
    for (const Pair& pair : pass) {
      const int64_t waited_ns = device::Event::elapsed_ns_of_passed(pair.before, pair.until);
      exposed_ns_ += std::max<int64_t>(0, waited_ns);
      if (pair.begun == Begun::kAhead) summary.add(waited_ns, pair.bytes);
    }
    summary.span_ns = device::Event::elapsed_ns_of_passed(pass.front().before, pass.back().before);
  } catch (const std::exception&) {
    // Several compute streams, one of them behind: nothing is learned from this pass.
    return {};
  }
  return summary;
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
