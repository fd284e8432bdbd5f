// A training step with and without offload on the simulated accelerator: an 8-layer Llama, 512 wide, 2x512 tokens,
// float32. Times are the virtual clock's and bytes the device's, so every number is the same on every machine.
//
// Two links: one that suffices, where a step should take as long as without offload, and one that does not, where it
// should take as long as the transfers. Fails if a loss or a parameter differs in one bit.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string_view>

#include "benchmarks/figure.h"
#include "benchmarks/sim_llama.h"
#include "neap/base/error.h"
#include "neap/trace/chrome_json.h"
#include "neap/trace/recorder.h"

namespace neap::bench {
namespace {

// Steps until the windows have settled, and steps that count.
constexpr int64_t kWarmUp = 6;
constexpr int64_t kMeasured = 2;
// Compute takes about six times as long as the transfers of one direction; then the transfers twice as long as compute.
constexpr Speeds kSufficient{.gflops = 2500, .link_gbps = 25};
constexpr Speeds kLinkBound{.gflops = 2500, .link_gbps = 2};

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }
double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

struct Worst {
  int64_t ns = 0, peak = 0, late = 0, host_allocations = 0, left_over = 0;
  double ratio = 1;  // R
};

Worst worst_of(const Training& training) {
  Worst worst;
  for (auto step = training.steps.end() - kMeasured; step != training.steps.end(); ++step) {
    worst.ns = std::max(worst.ns, step->ns);
    worst.peak = std::max(worst.peak, step->activation_peak);
    worst.host_allocations = std::max(worst.host_allocations, step->host_allocations);
    worst.left_over = std::max(worst.left_over, std::abs(step->left_over));
    if (!step->report) continue;
    worst.late = std::max(worst.late, step->report->late_reloads);
    worst.ratio = std::min(worst.ratio, step->report->ratio());
  }
  return worst;
}

void print_steps(const char* title, const Training& training) {
  std::printf("%s\n  step     ms  peak MiB  out MiB  in MiB  stall ms  late  windows MiB      R\n", title);
  for (size_t i = 0; i < training.steps.size(); ++i) {
    const Step& step = training.steps[i];
    const offload::StepReport report = step.report.value_or(offload::StepReport{});
    std::printf("  %4zu %6.2f %9.2f %8.2f %7.2f %9.3f %5lld %6.1f %5.1f %6.3f\n", i, ms(step.ns),
                mib(step.activation_peak), mib(step.counters.d2h.bytes), mib(step.counters.h2d.bytes),
                ms(step.counters.stall_ns), static_cast<long long>(report.late_reloads),
                mib(report.in_flight_window.count), mib(report.prefetch_window.count), report.ratio());
  }
}

int64_t differing(const Training& a, const Training& b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.steps.size(); ++i) count += a.steps[i].loss != b.steps[i].loss;
  for (size_t i = 0; i < a.parameters.size(); ++i) count += !at::equal(a.parameters[i], b.parameters[i]);
  return count;
}

}  // namespace

// offload_step [TRACE]: the trace of a steady step with the sufficient link.
int offload_step(int argc, char** argv) {
  const Workload workload;
  const offload::Options options;
  trace::Recorder recorder;
  trace::Recorder* const traced = argc > 0 ? &recorder : nullptr;
  constexpr int64_t kSteps = kWarmUp + kMeasured;
  const int64_t eligible = eligible_bytes(workload, options.min_bytes.count);

  const Training plain = train_on_sim(workload, kSufficient, kSteps, {});
  print_steps("without offload", plain);
  const Training offloaded = train_on_sim(workload, kSufficient, kSteps, options, traced);
  print_steps("with offload, 25 GB/s", offloaded);
  if (traced != nullptr) {
    std::ofstream file(argv[0]);
    trace::write_chrome_json(recorder, file);
  }
  const Training bound = train_on_sim(workload, kLinkBound, kSteps, options);
  print_steps("with offload, 2 GB/s", bound);

  const Worst base = worst_of(plain);
  const Worst sufficient = worst_of(offloaded);
  const Worst slow = worst_of(bound);
  const sim::Counters& last = offloaded.steps.back().counters;
  const sim::Counters& busy = bound.steps.back().counters;
  const int64_t transfer = busy.d2h.busy_ns + busy.h2d.busy_ns;
  NEAP_CHECK(transfer > base.ns, "the link should be the bottleneck: ", ms(transfer), " ms against ", ms(base.ns));
  std::printf("saved by the layers and not small: %.2f MiB; transfers when link-bound: %.2f ms\n", mib(eligible),
              ms(transfer));

  print_figure("offload_activation_peak_without", mib(base.peak), "MiB");
  print_figure("offload_activation_peak", mib(sufficient.peak), "MiB", 30);
  print_figure("offload_step_ratio", static_cast<double>(sufficient.ns) / static_cast<double>(base.ns), "x", 1.01);
  print_figure("offload_step_when_link_bound", static_cast<double>(slow.ns) / static_cast<double>(transfer), "x", 1.02);
  print_figure("offload_bytes_out_per_eligible_byte",
               static_cast<double>(last.d2h.bytes) / static_cast<double>(eligible), "x", 1);
  print_figure("offload_bytes_in_per_eligible_byte",
               static_cast<double>(last.h2d.bytes) / static_cast<double>(eligible), "x", 1);
  print_figure("offload_R", std::min(sufficient.ratio, slow.ratio), "x", 0.998, Better::kHigher);
  print_figure("offload_late_reloads", static_cast<double>(sufficient.late), "per step", 0);
  print_figure("offload_host_allocations",
               static_cast<double>(std::max(sufficient.host_allocations, slow.host_allocations)), "per step", 0);
  print_figure("offload_bytes_left_over", static_cast<double>(std::max(sufficient.left_over, slow.left_over)), "bytes",
               0);
  const int64_t different = differing(plain, offloaded) + differing(plain, bound);
  print_figure("offload_losses_and_parameters_that_differ", static_cast<double>(different), "tensors", 0);
  return different == 0 ? 0 : 1;
}

}  // namespace neap::bench
