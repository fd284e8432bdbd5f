// torch-free
#include "neap/train/memory_report.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace neap::train {
namespace {

// In the order of what they bring for what they cost.
void add_offload_remedies(const OffloadSection& offload, std::vector<std::string>& out) {
  const offload::Options& options = offload.options;
  if (options.mode == offload::Mode::kOff) {
    out.emplace_back("offload.mode: async (now off): activations leave the device until backward needs them");
    return;
  }
  if (!offload.modules.empty() || !offload.layers.empty()) {
    out.emplace_back("offload.modules and offload.layers: leave both out, and every layer's activations may leave");
  }
  if (options.device_budget.count > 0) {
    out.emplace_back("offload.device_budget: 0 (now " + to_string(options.device_budget) + ")");
  }
  if (options.min_bytes > Bytes(64 << 10)) {
    out.emplace_back("offload.min_bytes: 64KiB (now " + to_string(options.min_bytes) +
                     "): smaller activations leave, too");
  }
  if (options.keep_last != 0) out.emplace_back("offload.keep_last: 0: the last layer's activations leave as well");
  if (!std::holds_alternative<offload::Layers>(options.prefetch)) {
    out.emplace_back("offload.prefetch: 1: no more than one layer returns ahead of its use");
  }
  if (!options.device_limit) {
    out.emplace_back(
        "offload.device_limit: less than the device's memory by what an operator needs: beyond it none "
        "returns ahead of its use");
  }
  if (options.max_in_flight > Bytes(16 << 20)) {
    const Bytes less(std::max<int64_t>(options.max_in_flight.count / 4, int64_t{16} << 20));
    out.emplace_back("offload.max_in_flight: " + std::to_string(less.count >> 20) + "MiB (now " +
                     to_string(options.max_in_flight) + "): compute waits for the link sooner");
  }
  if (options.host_limit) {
    out.emplace_back("offload.host_limit: none (now " + to_string(*options.host_limit) +
                     "): beyond it activations stay on the device");
  }
}

}  // namespace

std::optional<Bytes> MemoryUse::activations() const {
  if (!peak) return std::nullopt;
  return std::max(Bytes(0), *peak - parameters - gradients - optimizer);
}

std::vector<std::string> remedies(const MemoryUse& use, const RunConfig& config) {
  std::vector<std::string> out;
  if (use.capacity && use.floor() > *use.capacity) {
    out.emplace_back("parameters, gradients and optimizer state alone need " + to_string(use.floor()) +
                     " of the device's " + to_string(*use.capacity) +
                     ": no setting of activations helps; take a larger device or a smaller model");
    return out;
  }
  add_offload_remedies(config.offload, out);
  if (config.recompute.mode == RecomputeMode::kNone) {
    out.emplace_back("recompute.mode: full (now none): layers keep their inputs alone and run again for backward");
  } else if (config.recompute.mode == RecomputeMode::kSelective) {
    out.emplace_back("recompute.mode: full (now selective): every layer keeps its inputs alone");
  }
  const TrainSection& train = config.train;
  if (train.batch > 1) {
    // The smallest divisor keeps the number of tokens in a step, and with it the update.
    int64_t parts = 2;
    while (train.batch % parts != 0) ++parts;
    out.emplace_back("train.batch: " + std::to_string(train.batch / parts) +
                     " with train.accumulation: " + std::to_string(train.accumulation * parts) +
                     ": as many tokens in a step, activations of fewer at a time");
  } else if (train.sequence > 1) {
    out.emplace_back("train.sequence: " + std::to_string(train.sequence / 2) + " (now " +
                     std::to_string(train.sequence) + ")");
  }
  if (train.dtype == Dtype::kFloat32) {
    out.emplace_back("train.dtype: bfloat16 (now float32): activations of half the size, over float32 parameters");
  }
  return out;
}

std::string describe(const Shortage& shortage, const RunConfig& config) {
  const MemoryUse& use = shortage.use;
  std::ostringstream out;
  out << "out of memory in " << shortage.when << ": " << shortage.reason << '\n';
  const auto line = [&](const char* what, Bytes bytes) {
    out << "    " << std::left << std::setw(26) << what << std::right << std::setw(12) << to_string(bytes) << '\n';
  };
  out << "  what held the memory";
  if (use.peak)
    out << " (" << *use.peak << " at the peak" << (use.capacity ? " of " + to_string(*use.capacity) : "") << ")";
  out << ":\n";
  line("parameters", use.parameters);
  line("gradients", use.gradients);
  line("optimizer state", use.optimizer);
  if (const auto activations = use.activations()) line("activations and workspace", *activations);
  out << "  what would lower it:\n";
  for (const std::string& remedy : remedies(use, config)) out << "    " << remedy << '\n';
  return out.str();
}

}  // namespace neap::train
