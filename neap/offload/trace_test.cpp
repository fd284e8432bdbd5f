// What the engine and the simulated device write into one Recorder, on the virtual clock: the lanes that `neap train`
// hands to Perfetto.
#include <algorithm>
#include <set>
#include <variant>

#include "neap/base/scope_exit.h"
#include "neap/device/device.h"
#include "neap/offload/test_support.h"
#include "neap/trace/recorder.h"

namespace neap::offload {
namespace {

using namespace testing;
using namespace neap::literals;

class Trace : public OffloadTest {
 protected:
  static constexpr int kUnits = 4;

  void SetUp() override {
    OffloadTest::SetUp();
    device::set_clock(kSim, [](c10::DeviceIndex index) { return control().host_time_ns(index); });
    control().set_recorder(&recorder_);
  }
  void TearDown() override {
    synchronize();
    control().set_recorder(nullptr);
    device::set_clock(kSim, {});
    OffloadTest::TearDown();
  }

  static int64_t number(const trace::Snapshot& snapshot, const trace::Event& event, std::string_view key) {
    for (const trace::Arg& arg : snapshot.args_of(event)) {
      if (arg.key == key) return std::get<int64_t>(arg.value);
    }
    ADD_FAILURE() << event.name << " has no " << key;
    return -1;
  }
  static std::vector<trace::Event> on(const trace::Snapshot& snapshot, std::string_view track) {
    std::vector<trace::Event> events;
    std::ranges::copy_if(snapshot.events, std::back_inserter(events), [&](const auto& e) { return e.track == track; });
    return events;
  }

  trace::Recorder recorder_;
};

TEST_F(Trace, ShowsUnitsCopiesWaitsAndBytes) {
  throttle_copies(0.05, 0.05);
  Chain chain(kUnits);
  Engine engine(all_sizes({.prefetch = Layers{1}, .keep_last = 0, .max_in_flight = 0_B}), {.recorder = &recorder_});
  engine.attach(*chain.model);
  synchronize();
  recorder_.clear();
  chain.loss().backward();
  synchronize();
  const StepReport report = engine.take_step_report();
  const trace::Snapshot snapshot = recorder_.snapshot();

  const auto forwards = on(snapshot, "offload/forward");
  ASSERT_EQ(forwards.size(), kUnits);
  int64_t saved = 0, kept = 0;
  for (size_t i = 0; i < forwards.size(); ++i) {
    EXPECT_EQ(forwards[i].name, "layers." + std::to_string(i));
    EXPECT_LE(forwards[i].begin_ns, forwards[i].end_ns);
    if (i > 0) {
      EXPECT_LE(forwards[i - 1].end_ns, forwards[i].begin_ns);
    }
    saved += number(snapshot, forwards[i], "saved");
    kept += number(snapshot, forwards[i], "kept");
  }
  EXPECT_EQ(saved, report.saved_tensors);
  EXPECT_EQ(kept, report.kept_tensors);

  const auto away = snapshot.find("offload/bytes", "away");
  ASSERT_EQ(away.size(), kUnits);  // where a unit's forward ends
  EXPECT_TRUE(std::ranges::is_sorted(away, {}, &trace::Event::value));
  EXPECT_EQ(Bytes(static_cast<int64_t>(away.back().value)), report.planned_drop);
  for (const trace::Event& event : snapshot.find("offload/bytes", "in flight")) EXPECT_EQ(event.value, 0);

  const auto bytes_of_copies = [&](std::string_view lane) {
    int64_t bytes = 0, end = 0;
    for (const trace::Event& copy : on(snapshot, lane)) {
      bytes += number(snapshot, copy, "bytes");
      EXPECT_GE(copy.begin_ns, end) << "one link moves one thing at a time";
      EXPECT_GT(copy.end_ns, copy.begin_ns);
      end = copy.end_ns;
    }
    return Bytes(bytes);
  };
  EXPECT_EQ(bytes_of_copies("sim:0/copies out"), report.offloaded_bytes);
  EXPECT_EQ(bytes_of_copies("sim:0/copies in"), report.reloaded_bytes);

  int64_t waited = 0;
  for (const trace::Event& wait : snapshot.find("sim:0/compute", "wait")) waited += wait.end_ns - wait.begin_ns;
  EXPECT_GT(waited, 0);
  EXPECT_FALSE(snapshot.find("sim:0/memory", "bytes in use").empty());
}

TEST_F(Trace, MarksEveryLateReload) {
  Chain chain(kUnits);
  Engine engine(all_sizes({.prefetch = 0_B, .keep_last = 0, .max_in_flight = 0_B}), {.recorder = &recorder_});
  engine.attach(*chain.model);
  chain.loss().backward();
  const StepReport report = engine.take_step_report();
  const trace::Snapshot snapshot = recorder_.snapshot();
  const auto late = on(snapshot, "offload/late reloads");
  EXPECT_GT(report.late_reloads, 0);
  EXPECT_EQ(static_cast<int64_t>(late.size()), report.late_reloads);
  int64_t bytes = 0;
  for (const trace::Event& event : late) bytes += number(snapshot, event, "bytes");
  EXPECT_EQ(Bytes(bytes), report.reloaded_bytes);
}

TEST_F(Trace, AnEngineThatIsGoneWritesNoMore) {
  Chain chain(kUnits);
  at::Tensor loss;
  {
    Engine engine(all_sizes({.prefetch = 0_B, .keep_last = 0, .max_in_flight = 0_B}), {.recorder = &recorder_});
    engine.attach(*chain.model);
    loss = chain.loss();
  }
  recorder_.clear();
  loss.backward();
  for (const trace::Event& event : recorder_.snapshot().events) EXPECT_FALSE(event.track.starts_with("offload/"));
}

}  // namespace
}  // namespace neap::offload
