#include "neap/train/trainer.h"

#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cmath>
#include <new>
#include <utility>

#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "neap/comm/world.h"
#include "neap/device/event.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "neap/shard/fully_shard.h"
#include "neap/trace/recorder.h"
#include "neap/train/clip.h"
#include "neap/train/determinism.h"
#include "neap/train/expert_balance.h"
#include "neap/train/parallel.h"
#include "neap/train/peak_meter.h"

namespace neap::train {
namespace {

double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// Up to the end of all work enqueued so far. The host's place on the device's clock would not do: it runs ahead.
std::optional<double> milliseconds_on_device(const device::Event& begin, device::Device& device) {
  const device::Event end = device.current_stream().record_timed();
  end.synchronize();
  const auto nanoseconds = device::Event::elapsed_ns(begin, end);
  return nanoseconds ? std::optional(static_cast<double>(*nanoseconds) * 1e-6) : std::nullopt;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

std::optional<std::string> out_of_memory_text(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const OutOfMemory*>(&error)) return ours->what();
  if (const auto* device = dynamic_cast<const c10::OutOfMemoryError*>(&error)) {
    return first_line(device->what_without_backtrace());
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "the host has no memory left";
  // torch's CPU allocator has no type of its own for this.
  if (const auto* other = dynamic_cast<const c10::Error*>(&error)) {
    const std::string text = first_line(other->what_without_backtrace());
    if (text.find("DefaultCPUAllocator: ") != std::string::npos) return text;
  }
  return std::nullopt;
}

MemoryUse memory_use(const std::vector<at::Tensor>& parameters, Bytes optimizer, const device::Device& device) {
  MemoryUse use;
  use.optimizer = optimizer;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.is_meta()) continue;  // still without memory: the model was being built
    use.parameters += Bytes(static_cast<int64_t>(parameter.nbytes()));
    if (parameter.grad().defined()) use.gradients += Bytes(static_cast<int64_t>(parameter.grad().nbytes()));
  }
  if (const auto stats = device.memory_stats()) use.peak = stats->allocated_peak;
  if (const auto capacity = device.capacity()) use.capacity = capacity->total;
  return use;
}

Trainer::Trainer(Parts parts, const TrainSection& train, double clip)
    : parts_(std::move(parts)),
      train_(train),
      clip_(clip),
      peak_(parts_.sharded == nullptr ? std::make_unique<PeakMeter>(all_parameters(), parts_.device)
                                      : std::make_unique<PeakMeter>(*parts_.sharded, parts_.device)),
      ranks_(parts_.world == nullptr ? 1 : parts_.world->size()),
      rank_(parts_.world == nullptr ? 0 : parts_.world->rank()),
      reader_(parts_.sequences, {.batch = train.batch,
                                 .sequence = train.sequence,
                                 .stride = train.batch * ranks_,
                                 .step = train.accumulation,
                                 .device = parts_.device.c10_device()}),
      steps_done_(parts_.steps_done),
      sequences_done_(parts_.sequences_done) {
  NEAP_ASSERT((parts_.world == nullptr) == (parts_.sharded == nullptr), "ranks and a sharded model come together");
}

Trainer::~Trainer() = default;

std::vector<at::Tensor> Trainer::all_parameters() const {
  std::vector<at::Tensor> all = parts_.optimizer.parameters();
  all.insert(all.end(), parts_.frozen.begin(), parts_.frozen.end());
  return all;
}

// Runs one part of the step: names it for messages and, with a recorder, draws it on the device's clock.
template <class Function>
void Trainer::phase(const char* name, Function&& function) {
  phase_ = name;
  peak_->begin_piece(name);
  const int64_t begin = parts_.recorder != nullptr ? parts_.device.now_ns() : 0;
  function();
  peak_->look(name);
  if (parts_.recorder != nullptr) {
    parts_.recorder->span("trainer/host", name, begin, parts_.device.now_ns(), {{"step", steps_done_ + 1}});
  }
}

// Sums of float32 depend on the order, so with several ranks they are made when all are there.
void Trainer::add_losses(const LossValue& value, Losses& losses) const {
  std::vector<at::Tensor> kinds = {value.loss.detach()};
  if (value.mtp_loss.defined()) kinds.push_back(value.mtp_loss.detach());
  losses.resize(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (losses[i].empty() || ranks_ > 1) {
      losses[i].push_back(kinds[i]);
    } else {
      losses[i].front() = at::add(losses[i].front(), kinds[i]);
    }
  }
}

// A step without labels has nothing to learn; its loss of 0 is no success.
double Trainer::divisor_of(int64_t labels) {
  if (labels > 0) return static_cast<double>(labels);
  if (rank_ == 0 && !std::exchange(warned_of_no_labels_, true)) {
    log_warning("step ", steps_done_ + 1,
                ": none of its labels counts, since each follows the end of a document (data.end_token); its loss is 0 "
                "and its gradients are, too. Look at the data; further steps of this kind are not named");
  }
  return 1;
}

// Of all ranks, those that the data does not leave out; `mine` are this rank's. Collective where it leaves out some.
int64_t Trainer::labels_of_all(int64_t mine) const {
  int64_t count = mine;
  if (!parts_.sequences.leaves_out()) return count * ranks_;
  if (parts_.world != nullptr) {
    const at::Tensor all = at::full({1}, count, at::TensorOptions(at::kLong));
    parts_.world->all().all_reduce(all, {.op = comm::ReduceOp::kSum}, "labels that count").wait();
    count = all.item<int64_t>();
  }
  return count;
}

void Trainer::accumulate_gradients(Losses& losses) {
  const c10::Device device = parts_.device.c10_device();
  double divisor = 0;
  for (int64_t micro = 0; micro < train_.accumulation; ++micro) {
    std::optional<LossValue> part;
    phase("forward", [&] {
      const Batch batch = reader_.read(sequences_done_ + (micro * ranks_ + rank_) * train_.batch);
      if (micro == 0) divisor = divisor_of(labels_of_all(batch.learned));
      part = parts_.loss(batch.inputs.to(device, /*non_blocking=*/true), batch.labels.to(device, /*non_blocking=*/true),
                         divisor);
    });
    phase("backward", [&] { part->objective.backward(); });
    add_losses(*part, losses);
  }
}

void Trainer::reduce(const Losses& losses, StepMetrics& metrics) {
  std::vector<double> values;
  if (parts_.sharded == nullptr) {
    metrics.grad_norm = global_norm(parts_.optimizer.parameters());
    for (const auto& kind : losses) values.push_back(kind.front().item<double>());
  } else {
    metrics.grad_norm = static_cast<float>(parts_.sharded->grad_norm());
    const bool stop = parts_.stop_requested && parts_.stop_requested();
    Exchanged exchanged = exchange(*parts_.world, losses, stop);
    values = std::move(exchanged.losses);
    stop_agreed_ = exchanged.stop;
  }
  metrics.loss = values[0];
  if (values.size() > 1) metrics.mtp_loss = values[1];
}

void Trainer::update(StepMetrics& metrics) {
  const bool finite = std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm);
  if (finite) {
    phase("update", [&] {
      clip_to(parts_.optimizer.parameters(), metrics.grad_norm, clip_);
      parts_.optimizer.step(metrics.lr);
    });
    return;
  }
  if (train_.non_finite == NonFinite::kStop) {
    throw NonFiniteError(neap::internal::concat("step ", metrics.step, ": the loss is ", metrics.loss,
                                                " and the gradient norm ", metrics.grad_norm,
                                                "; the update was not made. A lower optim.lr or optim.clip may help; "
                                                "train.non_finite: skip goes on without such updates"));
  }
  metrics.skipped = true;
}

StepMetrics Trainer::step() {
  device::Device& device = parts_.device;
  const auto begin = std::chrono::steady_clock::now();
  const device::Event device_begin = device.current_stream().record_timed();
  device.reset_peak();
  peak_->begin_step(parts_.optimizer.state_bytes());
  const ScopeExit drop_gradients([&] { parts_.optimizer.zero_grad(); });

  if (parts_.experts != nullptr) parts_.experts->begin_step();
  StepMetrics metrics;
  metrics.step = steps_done_ + 1;
  metrics.lr = parts_.rate.at(steps_done_);
  const auto waited = reader_.waited();
  metrics.tokens = train_.batch * train_.sequence * train_.accumulation * ranks_;
  try {
    Losses losses;
    accumulate_gradients(losses);
    phase("gradient norm", [&] { reduce(losses, metrics); });
    update(metrics);
    if (parts_.experts != nullptr) metrics.expert_load = parts_.experts->end_step(!metrics.skipped);
  } catch (const std::exception& error) {
    if (const auto text = nondeterministic_text(error)) throw UserError(*text);
    const auto reason = out_of_memory_text(error);
    if (!reason) throw;
    throw DeviceOutOfMemory({.when = neap::internal::concat("the ", phase_, " of step ", metrics.step),
                             .reason = *reason,
                             .use = memory_use(all_parameters(), parts_.optimizer.state_bytes(), device)});
  }
  ++steps_done_;
  sequences_done_ += train_.accumulation * ranks_ * train_.batch;
  metrics.step_ms = milliseconds_since(begin);
  metrics.data_wait_ms = std::chrono::duration<double, std::milli>(reader_.waited() - waited).count();
  if (parts_.device_has_clock) metrics.device_step_ms = milliseconds_on_device(device_begin, device);
  if (const auto stats = device.memory_stats()) metrics.device_peak = stats->allocated_peak;
  metrics.peak_parts = peak_->parts();
  add_offload_report(metrics);
  add_recompute_report(metrics);
  return metrics;
}

void Trainer::add_offload_report(StepMetrics& metrics) const {
  if (parts_.engine == nullptr) return;
  offload::StepReport report = parts_.engine->take_step_report();
  metrics.host_bytes = report.host_locked;
  metrics.offloaded_bytes = report.offloaded_bytes;
  metrics.reloaded_bytes = report.reloaded_bytes;
  metrics.late_reloads = report.late_reloads;
  metrics.exposed_wait_ms = static_cast<double>(report.exposed_wait_ns) * 1e-6;
  metrics.planned_drop = report.planned_drop;
  metrics.measured_drop = report.measured_drop;
  // What the peak is made of is known here alone, and says more than that it lies elsewhere.
  const std::string place = std::exchange(report.peak_piece, {});
  if (metrics.peak_parts) metrics.peak_parts->place = place;
  metrics.findings = report.findings();
  if (metrics.peak_parts && 2 * metrics.peak_parts->activations.count < report.planned_drop.count) {
    metrics.findings.push_back(neap::internal::concat("of the peak only ", metrics.peak_parts->activations,
                                                      " are activations; offload cannot lower the rest"));
  }
}

void Trainer::add_recompute_report(StepMetrics& metrics) const {
  if (parts_.recompute == nullptr) return;
  const recompute::StepReport report = parts_.recompute->take_step_report();
  metrics.reruns = report.reruns;
  metrics.bytes_not_kept = report.bytes_not_kept;
  for (std::string& finding : report.findings()) metrics.findings.push_back(std::move(finding));
}

}  // namespace neap::train
