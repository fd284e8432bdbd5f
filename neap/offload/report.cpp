// torch-free
#include "neap/offload/report.h"

#include <sstream>

#include "neap/base/error.h"

namespace neap::offload {

double StepReport::ratio() const {
  if (planned_drop.count <= 0) return 1;
  return static_cast<double>(measured_drop.count) / static_cast<double>(planned_drop.count);
}

std::vector<std::string> StepReport::findings() const {
  std::vector<std::string> lines;
  for (const UnitBytes& held : still_referenced) {
    lines.push_back(internal::concat(held.bytes, " saved by ", held.unit,
                                     " were copied to the host but stay on the device: another owner holds them"));
  }
  for (const std::string& unit : never_hit) {
    lines.push_back(internal::concat("unit ", unit,
                                     " saved nothing that could leave; check that its forward runs with ",
                                     "gradients, and the size of its tensors against offload.min_bytes"));
  }
  if (!peak_piece.empty() && 2 * away_at_peak.count < planned_drop.count) {
    lines.push_back(internal::concat("the peak was reached ", peak_piece, ", when only ", away_at_peak, " of ",
                                     planned_drop, " were away: it is not made of saved activations, and offload ",
                                     "cannot lower it"));
  }
  if (late_reloads > 0) {
    lines.push_back(internal::concat(late_reloads, " of ", reloaded_storages,
                                     " reloads began only when they were needed; a wider offload.prefetch would help"));
  }
  return lines;
}

std::string to_string(const StepReport& report) {
  std::ostringstream out;
  out << "offload: " << report.offloaded_bytes << " out in " << report.offloaded_storages << " copies, "
      << report.reloaded_bytes << " in, " << report.late_reloads << " late, waited "
      << static_cast<double>(report.exposed_wait_ns) / 1e6 << " ms\n"
      << "peak: planned drop " << report.planned_drop << ", measured " << report.measured_drop << " (R "
      << report.ratio() << "), " << report.stayed_bytes << " stayed by plan\n";
  if (report.device_peak && !report.peak_piece.empty()) {
    out << "      " << *report.device_peak << " on the device, reached " << report.peak_piece << " with "
        << report.away_at_peak << " away\n";
  }
  out << "host: " << report.host_bytes << " in use, " << report.host_locked << " held, peak " << report.host_locked_peak
      << '\n';
  for (const std::string& line : report.findings()) out << "note: " << line << '\n';
  return out.str();
}

}  // namespace neap::offload
