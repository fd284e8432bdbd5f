// torch-free
#include "neap/trace/chrome_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace neap::trace {
namespace {

using namespace neap::literals;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string text_of(const Recorder& recorder) {
  std::ostringstream out;
  write_chrome_json(recorder, out);
  return out.str();
}

std::vector<json> events_of(const Recorder& recorder, const std::string& phase) {
  std::vector<json> found;
  const json trace = json::parse(text_of(recorder));
  for (const json& event : trace["traceEvents"])
    if (event["ph"] == phase) found.push_back(event);
  return found;
}

std::string quoted(std::string_view text) {
  std::ostringstream out;
  write_json_string(text, out);
  return out.str();
}

TEST(ChromeJson, AnEmptyRecordIsAnEmptyTrace) {
  EXPECT_THAT(json::parse(text_of(Recorder()))["traceEvents"], IsEmpty());
}

TEST(ChromeJson, GroupsBecomeNamedProcessesAndLanesNamedThreads) {
  Recorder recorder;
  recorder.span("device 0/compute", "a", 0, 1);
  recorder.span("device 0/out-stream", "b", 0, 1);
  recorder.span("host", "c", 0, 1);
  const std::vector<json> spans = events_of(recorder, "X");
  EXPECT_EQ(spans[0]["pid"], spans[1]["pid"]);
  EXPECT_NE(spans[0]["tid"], spans[1]["tid"]);
  EXPECT_NE(spans[0]["pid"], spans[2]["pid"]);

  std::vector<std::string> names;
  for (const json& event : events_of(recorder, "M"))
    if (event["args"].contains("name"))
      names.push_back(event["name"].get<std::string>() + ":" + event["args"]["name"].get<std::string>());
  EXPECT_THAT(names, ElementsAre("process_name:device 0", "thread_name:compute", "thread_name:out-stream",
                                 "process_name:host", "thread_name:host"));
}

TEST(ChromeJson, TimesKeepTheirNanosecondsHoweverLarge) {
  Recorder recorder;
  recorder.span("t", "n", 1'234'567'890'123'456'789, 1'234'567'890'123'456'790);
  recorder.instant("t", "before the epoch", -1'500);
  const std::string text = text_of(recorder);
  EXPECT_THAT(text, ::testing::HasSubstr("\"ts\":1234567890123456.789,\"dur\":0.001"));
  EXPECT_THAT(text, ::testing::HasSubstr("\"ts\":-1.500"));
}

TEST(ChromeJson, DetailsAndCountersKeepTypeAndValue) {
  Recorder recorder;
  recorder.span("t", "n", 0, 1, {{"bytes", 2_GiB}, {"share", 0.1}, {"layer", "l.0"}, {"ratio", std::nan("")}});
  recorder.counter("t", "allocated", 5, 0.1);
  const json args = events_of(recorder, "X")[0]["args"];
  EXPECT_EQ(args["bytes"].get<int64_t>(), int64_t{2} << 30);
  EXPECT_EQ(args["share"].get<double>(), 0.1);
  EXPECT_EQ(args["layer"], "l.0");
  EXPECT_EQ(args["ratio"], "nan");
  EXPECT_EQ(events_of(recorder, "C")[0]["args"]["value"].get<double>(), 0.1);
}

TEST(ChromeJson, AnyNameGivesWellFormedJson) {
  Recorder recorder;
  std::string hostile;
  for (int c = 0; c < 256; ++c) hostile.push_back(static_cast<char>(c));
  recorder.span(hostile, hostile, 0, 1, {{hostile, hostile}});
  recorder.counter(hostile, hostile, 0, std::numeric_limits<double>::denorm_min());
  EXPECT_TRUE(json::accept(text_of(recorder)));
}

TEST(ChromeJson, ATruncatedRecordSaysSo) {
  Recorder recorder({.limit = 1_KiB});
  for (int i = 0; i < 100; ++i) recorder.instant("t", "n", i);
  const json last = events_of(recorder, "i").back();
  EXPECT_EQ(last["name"], "dropped events");
  EXPECT_EQ(last["args"]["count"].get<int64_t>(), recorder.dropped());
}

TEST(JsonString, EscapesWhatJsonReservesAndKeepsUtf8) {
  EXPECT_EQ(quoted("a\"b\\c\n\t\x01"), "\"a\\\"b\\\\c\\n\\t\\u0001\"");
  EXPECT_EQ(quoted("Gezeiten \u00e4 \u6f6e \U0001F30A"), "\"Gezeiten \u00e4 \u6f6e \U0001F30A\"");
}

TEST(JsonString, ReplacesWhatIsNotUtf8) {
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(quoted("\x80"), '"' + bad + '"');                                   // a continuation without a start
  EXPECT_EQ(quoted("\xC3"), '"' + bad + '"');                                   // cut short
  EXPECT_EQ(quoted("\xC0\xAF"), '"' + bad + bad + '"');                         // longer than needed
  EXPECT_EQ(quoted("\xED\xA0\x80"), '"' + bad + bad + bad + '"');               // a surrogate
  EXPECT_EQ(quoted("\xF4\x90\x80\x80x"), '"' + bad + bad + bad + bad + "x\"");  // beyond U+10FFFF
}

}  // namespace
}  // namespace neap::trace
