#include <nlohmann/json.hpp>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/train/metrics.h"

namespace neap::train {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}
Json or_null(const std::optional<Bytes>& value) { return value ? Json(value->count) : Json(); }
Json or_null(const std::optional<PeakParts>& value) {
  if (!value) return {};
  return Json{{"piece", value->piece},
              {"place", value->place},
              {"parameters", value->parameters.count},
              {"gradients", value->gradients.count},
              {"optimizer", value->optimizer.count},
              {"activations", value->activations.count},
              {"workspace", value->workspace.count}};
}

// Whole lines alone: a run that was killed may have left half of one.
std::string lines_of_first_steps(const std::filesystem::path& path, int64_t kept) {
  std::ifstream in(path);
  std::string out;
  for (std::string line; kept > 0 && std::getline(in, line);) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool whole = json.is_object() && json.contains("step") && json["step"].is_number_integer();
    if (whole && json["step"].get<int64_t>() <= kept) out += line + "\n";
  }
  return out;
}

}  // namespace

std::string to_json_line(const StepMetrics& m) {
  return Json{{"step", m.step},
              {"loss", m.loss},
              {"grad_norm", m.grad_norm},
              {"mtp_loss", or_null(m.mtp_loss)},
              {"lr", m.lr},
              {"tokens", m.tokens},
              {"tokens_per_s", m.tokens_per_s()},
              {"step_ms", m.step_ms},
              {"data_wait_ms", m.data_wait_ms},
              {"device_step_ms", or_null(m.device_step_ms)},
              {"mfu", or_null(m.mfu)},
              {"eval_loss", or_null(m.eval_loss)},
              {"eval_ms", m.eval_ms},
              {"device_peak", or_null(m.device_peak)},
              {"peak_parts", or_null(m.peak_parts)},
              {"host_bytes", m.host_bytes.count},
              {"offloaded_bytes", m.offloaded_bytes.count},
              {"reloaded_bytes", m.reloaded_bytes.count},
              {"late_reloads", m.late_reloads},
              {"exposed_wait_ms", m.exposed_wait_ms},
              {"planned_drop", m.planned_drop.count},
              {"measured_drop", m.measured_drop.count},
              {"reruns", m.reruns},
              {"bytes_not_kept", m.bytes_not_kept.count},
              {"expert_load", m.expert_load.empty() ? Json() : Json(m.expert_load)},
              {"skipped", m.skipped}}
      .dump();
}

std::string to_json(const RunSummary& summary, const std::string& message) {
  const StepMetrics total = summary.totals();
  const StepMetrics* fullest = summary.fullest_step();
  Json losses = Json::array();
  Json norms = Json::array();
  for (const StepMetrics& step : summary.steps) {
    losses.push_back(step.loss);
    norms.push_back(step.grad_norm);
  }
  return Json{{"name", summary.name},
              {"status", to_string(summary.status)},
              {"message", message.empty() ? Json() : Json(message)},
              {"capacity_bytes", or_null(summary.capacity)},
              {"out_of_memory", summary.status == RunStatus::kOutOfMemory},
              {"peak_bytes", or_null(summary.peak)},
              {"peak_parts", or_null(fullest == nullptr ? std::nullopt : fullest->peak_parts)},
              {"step_ms", summary.step_ms()},
              {"device_step_ms", or_null(summary.device_step_ms())},
              {"mfu", or_null(summary.mfu())},
              {"eval_loss", or_null(summary.eval_loss())},
              {"loss", losses},
              {"grad_norm", norms},
              {"offloaded_bytes", total.offloaded_bytes.count},
              {"reloaded_bytes", total.reloaded_bytes.count},
              {"late_reloads", total.late_reloads},
              {"exposed_wait_ms", total.exposed_wait_ms},
              {"host_bytes", total.host_bytes.count},
              {"reruns", total.reruns},
              {"bytes_not_kept", total.bytes_not_kept.count},
              {"ratio", or_null(summary.ratio())}}
             .dump(2) +
         "\n";
}

MetricsFile::MetricsFile(const std::filesystem::path& path, int64_t kept) {
  if (kept > 0) write_file(path, lines_of_first_steps(path, kept));
  out_.open(path, kept > 0 ? std::ios::app : std::ios::trunc);
  NEAP_CHECK(out_.good(), "[log.dir] ", path.string(), " cannot be written; check the directory's permissions");
}

void MetricsFile::write(const StepMetrics& metrics) {
  out_ << to_json_line(metrics) << std::endl;
  NEAP_CHECK(out_.good(), "[log.dir] metrics.jsonl cannot be written any more; check the space on the disk");
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  write_file(path, [&](std::ostream& out) { out << text; });
}

void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& print) {
  const std::filesystem::path fresh = path.string() + ".new";
  const ScopeExit remove_remains([&] {
    std::error_code ignored;
    std::filesystem::remove(fresh, ignored);
  });
  {
    std::ofstream out(fresh, std::ios::binary | std::ios::trunc);
    print(out);
    out.flush();
    NEAP_CHECK(out.good(), "[log.dir] ", path.string(), " cannot be written; check permissions and space");
  }
  std::error_code error;
  std::filesystem::rename(fresh, path, error);
  NEAP_CHECK(!error, "[log.dir] ", path.string(), " cannot be written: ", error.message());
}

}  // namespace neap::train
