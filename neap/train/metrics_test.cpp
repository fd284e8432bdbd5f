// Metrics and the files they go to.
#include "neap/train/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/train/test_support.h"

namespace neap::train {
namespace {

TEST(Metrics, ALineHoldsEveryBitOfTheLoss) {
  const double loss = static_cast<double>(2.3456789F);
  const auto json = nlohmann::json::parse(to_json_line(step(1, loss, 50)));
  EXPECT_EQ(json["loss"].get<double>(), loss);
  EXPECT_EQ(json["tokens_per_s"], 2000);
  EXPECT_TRUE(json["device_peak"].is_null());
  const auto bad = nlohmann::json::parse(to_json_line(step(1, std::numeric_limits<double>::quiet_NaN(), 50)));
  EXPECT_TRUE(bad["loss"].is_null());
}

TEST(Metrics, TheLossOfFurtherTokensStandsBesideTheOther) {
  StepMetrics metrics = step(1, 2, 50);
  EXPECT_TRUE(nlohmann::json::parse(to_json_line(metrics))["mtp_loss"].is_null());
  EXPECT_FALSE(std::ranges::any_of(scalars(metrics), [](const auto& item) { return item.first == "mtp_loss"; }));
  metrics.mtp_loss = 3.5;
  EXPECT_EQ(nlohmann::json::parse(to_json_line(metrics))["mtp_loss"], 3.5);
  EXPECT_TRUE(std::ranges::any_of(scalars(metrics), [](const auto& item) { return item.first == "mtp_loss"; }));
}

TEST(Metrics, ALineHoldsThePartsOfThePeak) {
  StepMetrics metrics = step(1, 2, 50);
  EXPECT_TRUE(nlohmann::json::parse(to_json_line(metrics))["peak_parts"].is_null());
  metrics.peak_parts = PeakParts{.piece = "update", .place = "", .parameters = Bytes(3), .gradients = Bytes(4)};
  const auto parts = nlohmann::json::parse(to_json_line(metrics))["peak_parts"];
  EXPECT_EQ(parts["piece"], "update");
  EXPECT_EQ(parts["parameters"], 3);
  EXPECT_EQ(parts["gradients"], 4);
  EXPECT_EQ(parts["workspace"], 0);
}

TEST(Metrics, ASummarySumsBytesAndTakesTheMedianAfterTheFirstStep) {
  const auto json = nlohmann::json::parse(to_json(two_steps()));
  EXPECT_EQ(json["loss"], (std::vector<double>{3.5, 2.5}));
  EXPECT_EQ(json["grad_norm"], (std::vector<double>{7, 5}));
  EXPECT_EQ(json["step_ms"], 40);
  EXPECT_EQ(json["offloaded_bytes"], 20 << 20);
  EXPECT_EQ(json["late_reloads"], 3);
  EXPECT_EQ(json["out_of_memory"], false);
  EXPECT_EQ(json["ratio"], 0.99);
  EXPECT_TRUE(json["capacity_bytes"].is_null());
  EXPECT_TRUE(json["message"].is_null());
  EXPECT_EQ(nlohmann::json::parse(to_json(two_steps(), "why"))["message"], "why");
}

TEST(Metrics, TheMedianOfAnEvenNumberIsTheMiddle) {
  RunSummary summary = two_steps();
  summary.steps.push_back(step(3, 1, 60));
  EXPECT_EQ(summary.step_ms(), 50);
  EXPECT_EQ(RunSummary{}.step_ms(), 0);
  EXPECT_EQ(RunSummary{}.ratio(), std::nullopt);
}

TEST(Metrics, AFileThatCannotBeWrittenIsAUserError) {
  EXPECT_THROW(MetricsFile("/nonexistent/metrics.jsonl"), UserError);
  EXPECT_THROW(write_file("/nonexistent/summary.json", ""), UserError);
}

TEST(Metrics, AFileIsWrittenWholeOrNotAtAll) {
  const std::filesystem::path dir =
      std::filesystem::temp_directory_path() / ("neap_metrics_" + std::to_string(::getpid()));
  std::filesystem::create_directories(dir);
  const ScopeExit clean([&] { std::filesystem::remove_all(dir); });
  const auto half = [](std::ostream& out) {
    out << "half";
    out.setstate(std::ios::badbit);  // as when the disk is full
  };
  EXPECT_THROW(write_file(dir / "trace.json", half), UserError);
  EXPECT_TRUE(std::filesystem::is_empty(dir));
  write_file(dir / "trace.json", [](std::ostream& out) { out << "whole"; });
  EXPECT_EQ(std::filesystem::file_size(dir / "trace.json"), 5);
}

}  // namespace
}  // namespace neap::train
