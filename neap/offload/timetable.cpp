// torch-free
#include "neap/offload/timetable.h"

#include <algorithm>
#include <cmath>

namespace neap::offload {
namespace {

// Of the time from the first moment to the last, the link may be busy. Beyond it one copy that takes longer than
// reckoned makes all behind it late.
constexpr double kBusy = 0.9;
// A copy is reckoned to take so much more than the link's rate says.
constexpr double kMargin = 1.05;

}  // namespace

int64_t CopyCost::of(Bytes size) const { return std::llround(kMargin * ns_per_byte * static_cast<double>(size.count)); }

std::optional<Timetable> Timetable::make(const std::vector<SaveTime>& saves, const std::vector<UseTime>& uses,
                                         int64_t length, CopyCost out, CopyCost in) {
  if (saves.empty() || uses.empty()) return std::nullopt;
  Timetable table;
  table.length_ = length;
  for (const SaveTime& save : saves) table.sizes_.push_back(save.size);
  // The tail comes from backward, and forward has to know it.
  if (!table.plan_in(uses, in) || !table.plan_out(saves, out)) return std::nullopt;
  return table;
}

bool Timetable::plan_in(const std::vector<UseTime>& uses, CopyCost in) {
  const size_t count = uses.size();
  std::vector<int64_t> latest(count);  // moment to begin; rising, since the copies are done one after another
  for (size_t i = count; i-- > 0;) {
    const int64_t needed = uses[i].at_ns - in.slack_ns;
    latest[i] = (i + 1 < count ? std::min(needed, latest[i + 1]) : needed) - in.of(uses[i].size);
  }
  const int64_t begin = uses.front().at_ns;
  int64_t busy_ns = 0;
  for (size_t i = 0; i < count; ++i) {
    if (latest[i] < begin) {
      tail_ += uses[i].size;
    } else {
      busy_ns += in.of(uses[i].size);
    }
  }
  if (static_cast<double>(busy_ns) > kBusy * static_cast<double>(uses.back().at_ns - begin)) return false;

  in_by_.resize(static_cast<size_t>(length_));
  size_t begun = 0;
  Bytes ahead;
  for (size_t i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    for (; begun < count && (begun <= i || last || latest[begun] < uses[i + 1].at_ns); ++begun) {
      ahead += uses[begun].size;
    }
    ahead -= uses[i].size;
    ahead_ = std::max(ahead_, ahead);
    in_by_[static_cast<size_t>(uses[i].position)] = static_cast<int64_t>(begun);
    positions_.push_back(uses[i].position);
  }
  return true;
}

bool Timetable::plan_out(const std::vector<SaveTime>& saves, CopyCost out) {
  Bytes all;
  for (const SaveTime& save : saves) all += save.size;
  out_by_.assign(saves.size(), kNever);
  std::vector<int64_t> done;  // when the copy of each storage that leaves is over
  int64_t busy_ns = 0;
  Bytes saved, in_flight;
  size_t waiting = 0;  // the first whose copy is not known to be over
  for (size_t i = 0; i < saves.size(); ++i) {
    for (; waiting < done.size() && done[waiting] + out.slack_ns <= saves[i].at_ns; ++waiting) {
      out_by_[waiting] = static_cast<int64_t>(i);
      in_flight -= saves[waiting].size;
    }
    saved += saves[i].size;
    if (saved > all - tail_) continue;
    const int64_t takes_ns = out.of(saves[i].size);
    done.push_back(std::max(done.empty() ? 0 : done.back(), saves[i].at_ns) + takes_ns);
    busy_ns += takes_ns;
    in_flight += saves[i].size;
    in_flight_ = std::max(in_flight_, in_flight);
  }
  return static_cast<double>(busy_ns) <= kBusy * static_cast<double>(saves.back().at_ns - saves.front().at_ns);
}

}  // namespace neap::offload
