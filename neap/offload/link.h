// The way between one device and the host, for one engine: which streams copies run on, and what orders them.
//
// Overlapping: copies run on the device's out- and in-stream, ordered against compute by events. Not overlapping (a
// plain CPU, or mode sync): copies run on the compute stream itself, which orders them, and no event is needed.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>

#include "neap/base/bytes.h"
#include "neap/device/copy.h"
#include "neap/device/device.h"
#include "neap/device/event.h"
#include "neap/device/stream.h"
#include "neap/memory/host_pool.h"
#include "neap/offload/stall_meter.h"

namespace neap::offload {

// [begin, end) of a storage.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

// The compute stream at one call of ours, and its place in it as an event, recorded when first asked for. Nobody else
// enqueues on the stream meanwhile, so one event serves all that the call does: copies start behind it, and stalls are
// measured from it. REQUIRES: used within that call, which allocates what it copies into before it asks for the event.
class Moment {
 public:
  explicit Moment(const device::Stream& compute) : compute_(compute) {}

  const device::Stream& stream() const { return compute_; }
  const device::Event& event() {
    if (event_.is_null()) event_ = compute_.record_timed();
    return event_;
  }
  // What `copies` is given from now on starts behind it. Several copies that begin in one call share one wait.
  void goes_before(const device::Stream& copies) {
    if (behind_ && *behind_ == copies) return;
    copies.wait(event());
    behind_ = copies;
  }

 private:
  device::Stream compute_;
  device::Event event_;
  std::optional<device::Stream> behind_;
};

// Not thread-safe: guarded by the engine's lock.
class Link {
 public:
  Link(device::Device& device, bool overlap);

  device::Device& device() const { return device_; }
  bool overlaps() const { return overlaps_; }
  Moment now() const { return Moment(device_.current_stream()); }

  struct CopiedOut {
    device::Event done;  // null when the copy is ordered by the compute stream
    int64_t number = 0;  // copies out are done in the order of their numbers
  };
  // Enqueues the copy out of a range, behind what the compute stream has been given so far. Its end is also made known
  // to `host`. When it throws, nothing is under way.
  CopiedOut copy_out(const c10::Storage& source, ByteRange range, memory::HostBuffer& host, Moment& now);

  // Enqueues the copy of `host` into `target` from byte `pad` on, behind the copy out with that number and the compute
  // stream's place. Returns its end, which `host` knows, too.
  device::Event copy_in(memory::HostBuffer& host, int64_t copied_out, const c10::Storage& target, int64_t pad,
                        Moment& now);

  // Memory on the device, as the current stream's. Throws what the device's allocator throws.
  c10::Storage allocate(int64_t bytes) const;

  StallMeter& out_stalls() { return out_stalls_; }
  StallMeter& in_stalls() { return in_stalls_; }
  LinkRate& out_rate() { return out_rate_; }
  LinkRate& in_rate() { return in_rate_; }

 private:
  device::Event enqueue(const device::ByteSpan& to, const device::ByteSpan& from, const device::Stream& copies,
                        LinkRate& rate);
  void copy_in_order(const device::ByteSpan& to, const device::ByteSpan& from, const device::Stream& compute,
                     StallMeter& stalls);

  device::Device& device_;
  const bool overlaps_;
  StallMeter out_stalls_, in_stalls_;
  LinkRate out_rate_, in_rate_;
  int64_t copies_out_ = 0;
  int64_t in_has_waited_for_ = 0;  // the in-stream is behind the copies out up to this number
};

}  // namespace neap::offload
