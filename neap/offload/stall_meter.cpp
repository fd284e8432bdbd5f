#include "neap/offload/stall_meter.h"

#include <algorithm>
#include <utility>

namespace neap::offload {

void StallMeter::add(device::Event before, device::Event until, Bytes bytes) {
  if (pairs_.size() >= kMostPairs) {
    settle();
    if (pairs_.size() >= kMostPairs) pairs_.pop_front();
  }
  pairs_.push_back({std::move(before), std::move(until), bytes});
}

void StallMeter::settle() {
  while (!pairs_.empty()) {
    Pair& pair = pairs_.front();
    const auto waited = device::Event::elapsed_ns(pair.before, pair.until);
    if (!waited) return;
    summary_.add(*waited, pair.bytes);
    exposed_ns_ += std::max<int64_t>(0, *waited);
    if (!first_) first_ = pair.before;
    summary_.span_ns = device::Event::elapsed_ns(*first_, pair.before).value_or(0) + std::max<int64_t>(0, *waited);
    pairs_.pop_front();
  }
}

WaitSummary StallMeter::take_summary() {
  first_.reset();
  return std::exchange(summary_, {});
}

int64_t StallMeter::take_exposed_ns() { return std::exchange(exposed_ns_, 0); }

void LinkRate::add(device::Event begin, device::Event end, Bytes bytes) {
  if (samples_.size() >= kMostSamples) samples_.pop_front();
  samples_.push_back({std::move(begin), std::move(end), bytes});
}

void LinkRate::settle() {
  // The largest copy tells most about the link; the latency weighs least in it.
  Bytes largest;
  while (!samples_.empty()) {
    const Sample& sample = samples_.front();
    const auto took = device::Event::elapsed_ns(sample.begin, sample.end);
    if (!took) return;
    if (*took > 0 && sample.bytes >= largest) {
      largest = sample.bytes;
      ns_per_byte_ = static_cast<double>(*took) / static_cast<double>(sample.bytes.count);
    }
    samples_.pop_front();
  }
}

}  // namespace neap::offload
