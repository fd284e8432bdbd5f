// What the regions of one Recompute share with it. Owned by them together: regions may outlive it.
#pragma once

#include <atomic>
#include <cstdint>

#include "neap/autograd/resident_storages.h"
#include "neap/base/mutex.h"
#include "neap/recompute/options.h"

namespace neap::trace {
class Recorder;
}

namespace neap::recompute::internal {

struct Shared {
  Shared(const Options& o, trace::Recorder* r) : options(o), recorder(r) {}

  const Options options;
  Mutex recording;
  trace::Recorder* recorder NEAP_GUARDED_BY(recording);  // null when nobody records, or not any more
  autograd::ResidentStorages residents;                  // parameters and buffers: kept whatever becomes of regions
  std::atomic<int64_t> regions = 0;
  std::atomic<int64_t> reruns = 0;
  std::atomic<int64_t> saved_tensors = 0;
  std::atomic<int64_t> bytes_not_kept = 0;
};

}  // namespace neap::recompute::internal
