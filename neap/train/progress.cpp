// torch-free
#include "neap/train/progress.h"

#include <array>
#include <charconv>
#include <cmath>

#include "neap/base/error.h"

namespace neap::train {
namespace {

using neap::internal::concat;

constexpr size_t kBarWidth = 30;

std::string number(double value, std::chars_format format, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  std::array<char, 400> text;  // the largest double has 309 digits before the point
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format, digits).ptr;
  return {text.data(), end};
}

std::string percent(double part) { return fixed(100 * part, 1) + "%"; }

std::string scientific(double value, int digits) { return number(value, std::chars_format::scientific, digits); }

}  // namespace

std::string fixed(double value, int digits) { return number(value, std::chars_format::fixed, digits); }

std::string table_row(std::string what, const std::string& value) {
  what.resize(std::max<size_t>(what.size() + 1, 24), ' ');
  return "  " + what + value + "\n";
}

Progress::Progress(std::ostream& out, bool terminal, int64_t steps) : out_(out), terminal_(terminal), steps_(steps) {}

Progress::~Progress() { clear_bar(); }

void Progress::clear_bar() {
  if (terminal_) out_ << "\r\033[K" << std::flush;
}

void Progress::draw_bar() {
  if (!terminal_ || done_ == steps_) return;
  const auto filled = kBarWidth * static_cast<size_t>(done_) / static_cast<size_t>(steps_);
  const double left_ms = taken_ > 0 ? total_ms_ / static_cast<double>(taken_) * static_cast<double>(steps_ - done_) : 0;
  out_ << '[' << std::string(filled, '#') << std::string(kBarWidth - filled, '.') << "] " << done_ << '/' << steps_
       << "  " << format_ms(left_ms) << " left" << std::flush;
}

void Progress::step(const StepMetrics& metrics) {
  done_ = metrics.step;
  ++taken_;
  total_ms_ += metrics.step_ms;
  line(step_line(metrics, steps_));
}

void Progress::line(const std::string& text) {
  clear_bar();
  out_ << text << '\n' << std::flush;
  draw_bar();
}

std::string format_ms(double milliseconds) {
  if (milliseconds < 1000) return fixed(milliseconds, 1) + " ms";
  if (milliseconds < 120'000) return fixed(milliseconds / 1000, 2) + " s";
  const auto seconds = static_cast<int64_t>(milliseconds / 1000);
  return concat(seconds / 60, " min ", seconds % 60, " s");
}

std::string step_line(const StepMetrics& m, int64_t steps) {
  std::string out =
      concat("step ", m.step, "/", steps, "  loss ", fixed(m.loss, 4), "  grad_norm ", fixed(m.grad_norm, 3), "  lr ",
             scientific(m.lr, 2), "  ", fixed(m.tokens_per_s(), 0), " tok/s  step ", format_ms(m.step_ms));
  if (m.mtp_loss) out += "  mtp_loss " + fixed(*m.mtp_loss, 4);
  if (m.device_step_ms) out += " (device " + format_ms(*m.device_step_ms) + ")";
  if (m.mfu) out += "  mfu " + percent(*m.mfu);
  if (m.device_peak) out += "  peak " + to_string(*m.device_peak);
  if (m.host_bytes.count > 0) out += concat("  host ", m.host_bytes, "  late ", m.late_reloads);
  if (m.eval_loss) out += "  eval_loss " + fixed(*m.eval_loss, 4) + " (" + format_ms(m.eval_ms) + ")";
  if (m.skipped) out += "  SKIPPED: not finite";
  return out;
}

std::string final_table(const RunSummary& summary) {
  const StepMetrics total = summary.totals();
  std::string out;
  const auto row = [&](const char* what, const std::string& value) { out += table_row(what, value); };
  row("steps", concat(summary.steps.size(), " (", to_string(summary.status), ")"));
  if (!summary.steps.empty()) {
    row("loss", fixed(summary.steps.front().loss, 4) + " → " + fixed(summary.steps.back().loss, 4));
  }
  if (const auto loss = summary.eval_loss()) row("loss on data.eval", fixed(*loss, 4));
  row("step time", format_ms(summary.step_ms()));
  if (const auto device = summary.device_step_ms()) row("step time on device", format_ms(*device));
  if (const auto mfu = summary.mfu()) row("model FLOPs done", percent(*mfu) + " of what the devices can do");
  if (summary.peak) {
    row("device peak", to_string(*summary.peak) + (summary.capacity ? " of " + to_string(*summary.capacity) : ""));
  }
  const StepMetrics* fullest = summary.fullest_step();
  if (fullest != nullptr && fullest->peak_parts) {
    const PeakParts& parts = *fullest->peak_parts;
    row("  reached in",
        concat("the ", parts.piece, " of step ", fullest->step, parts.place.empty() ? "" : ", " + parts.place));
    row("  parameters", to_string(parts.parameters));
    row("  gradients", to_string(parts.gradients));
    row("  optimizer state", to_string(parts.optimizer));
    row("  activations", to_string(parts.activations));
    row("  workspace", to_string(parts.workspace));
  }
  if (total.planned_drop.count > 0) {
    row("planned drop of peak", to_string(total.planned_drop));
    row("measured drop", concat(total.measured_drop, " (R = ", fixed(*summary.ratio(), 4), ")"));
  }
  if (total.offloaded_bytes.count > 0) {
    row("bytes out / in", to_string(total.offloaded_bytes) + " / " + to_string(total.reloaded_bytes));
    row("late reloads", std::to_string(total.late_reloads));
    row("exposed wait", format_ms(total.exposed_wait_ms));
    row("host memory", to_string(total.host_bytes));
  }
  if (total.reruns > 0) {
    row("recomputed", concat(total.reruns, " units, ", total.bytes_not_kept, " not kept in a step"));
  }
  if (!summary.steps.empty()) {
    for (const std::string& finding : summary.steps.back().findings) row("note", finding);
  }
  return out;
}

}  // namespace neap::train
