// torch-free
// A function of the host that runs in the order of a device's stream, and what it does to the device's memory. Shared
// by those who ask for it (neap/device/host_task.h) and those who run it (neap/sim).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "neap/base/bytes.h"

namespace neap {

struct HostTask {
  // Bytes of device memory that the function reads or writes.
  struct Range {
    const void* data = nullptr;
    int64_t bytes = 0;
    bool write = false;
  };

  std::function<void()> work;  // must not throw, and must not use the device
  const char* what = "";       // lives for ever; for traces and reports
  std::vector<Range> ranges;
  // What it costs on a device whose time is modelled: bytes over the link between devices, and how often its latency.
  Bytes wire_bytes;
  int latencies = 1;
  // Where a trace on the device's clock draws it, and under which name; empty: where copies are drawn, as `what`.
  std::string track, label;
};

}  // namespace neap
