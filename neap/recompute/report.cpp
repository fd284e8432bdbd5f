// torch-free
#include "neap/recompute/report.h"

#include "neap/base/error.h"

namespace neap::recompute {

std::vector<std::string> StepReport::findings() const {
  std::vector<std::string> found;
  if (!idle_units.empty()) {
    found.push_back(internal::concat(
        "recompute: ", idle_units.size(), " chosen unit", idle_units.size() == 1 ? "" : "s", ", ", idle_units.front(),
        idle_units.size() == 1 ? "" : " first", ": no forward pass with gradients went through"));
  }
  if (regions > 0 && bytes_not_kept.count == 0) {
    found.emplace_back("recompute: the chosen units save nothing but their inputs; running them again frees no memory");
  }
  return found;
}

std::string to_string(const StepReport& report) {
  return internal::concat("recompute: ", report.regions, " forward passes of units, ", report.saved_tensors,
                          " saved tensors (", report.bytes_not_kept, ") not kept, ", report.reruns, " run again");
}

}  // namespace neap::recompute
