#include "neap/train/yaml_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "neap/base/error.h"
#include "neap/train/schema.h"
#include "testing/error_of.h"

namespace neap::train {
namespace {

using ::testing::HasSubstr;

constexpr const char* kMinimal = "model: {path: m}\ndata: {path: d}\n";

std::string parse_error(const std::string& yaml, const std::vector<Override>& overrides = {}) {
  return testing::error_of([&] { parse_config(yaml, "run.yaml", overrides); });
}

// Values that are not of the kind that the schema names for the key, or beyond its range. Texts and lists of texts are
// refused by what they name.
std::vector<std::string> wrong_values(const Key& key) {
  static const std::vector<std::pair<std::string, std::vector<std::string>>> by_kind = {
      {"text", {}},
      {"list of", {}},
      {"integer", {"1.5", "many", "", "[1]"}},
      {"number", {"much", "nan", "", "[1]"}},
      {"2 numbers", {"0.9", "[0.9]", "[0.9, 0.9, 0.9]", "[0.9, x]", "[-1, 0.9]", "[0.9, 1]"}},
      {"true or false", {"1", "maybe", "[true]"}},
      {"size", {"-1", "1 parsec", "many"}},
      {"rate", {"-1GB/s", "fast"}},
      {"time", {"-1s", "5 lightyears", "soon"}},
      {"automatic, layers or size", {"-1", "soon"}},
      {"", {"neither", "", "[off]"}},  // words that are listed
  };
  std::vector<std::string> wrong =
      std::ranges::find_if(by_kind, [&](const auto& kind) { return key.type.starts_with(kind.first); })->second;
  static const std::regex range("(?:integer|number) (?:from|at least|above) (\\S+)(?: to (\\S+))?.*");
  std::smatch bounds;
  const std::string kind = key.type + " " + key.range;
  if (!std::regex_match(kind, bounds, range)) return wrong;
  for (const int bound : {1, 2}) {
    if (!bounds[bound].matched) continue;
    std::ostringstream beyond;
    beyond.precision(17);
    beyond << std::stod(bounds[bound]) + (bound == 1 ? -1 : 1);
    wrong.push_back(beyond.str());
  }
  return wrong;
}

TEST(YamlConfig, EveryKeyRefusesWhatIsNotOfItsKindOrBeyondItsRange) {
  for (const Key& key : keys()) {
    for (const std::string& value : wrong_values(key)) {
      EXPECT_THAT(parse_error(kMinimal, {{key.path, value}}),
                  ::testing::StartsWith("[--" + key.path + "] " + key.path + ": expected "))
          << value;
    }
  }
}

TEST(YamlConfig, ReadsSectionsListsAndPatternsWithBraces) {
  const RunConfig config = parse_config(
      "model:\n  path: m\ndata:\n  path: d\ntrain:\n  steps: 7\noffload:\n  mode: async\n  modules:\n"
      "    - model.layers.{*}.mlp\n    - \"model.norm\"\noptim: {betas: [0.5, 0.6]}\nlog:\n",
      "run.yaml", {{"offload.layers", "[]"}});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_THAT(config.offload.modules, ::testing::ElementsAre("model.layers.{*}.mlp", "model.norm"));
  EXPECT_THAT(config.optim.betas, ::testing::ElementsAre(0.5, 0.6));
}

TEST(YamlConfig, OverridesWinAndTakePatternsUnquoted) {
  const RunConfig config = parse_config(std::string(kMinimal) + "train: {steps: 7}\n", "run.yaml",
                                        {{"train.steps", "20"},
                                         {"train.steps", "21"},
                                         {"offload.modules", "model.layers.{*}"},
                                         {"optim.betas", "[0.1, 0.2]"}});
  EXPECT_EQ(config.train.steps, 21);
  EXPECT_THAT(config.offload.modules, ::testing::ElementsAre("model.layers.{*}"));
  EXPECT_THAT(config.optim.betas, ::testing::ElementsAre(0.1, 0.2));
}

TEST(YamlConfig, TheLengthIsToldInStepsOrInTokensAndTheCommandLineWins) {
  const std::string steps = std::string(kMinimal) + "train: {steps: 7}\n";
  const std::string tokens = std::string(kMinimal) + "train: {tokens: 900}\n";
  EXPECT_EQ(parse_config(steps, "run.yaml", {{"train.tokens", "50"}}).train.tokens, 50);
  EXPECT_EQ(parse_config(tokens, "run.yaml", {{"train.steps", "9"}}).train.tokens, std::nullopt);
  EXPECT_EQ(parse_config(tokens, "run.yaml", {}).train.tokens, 900);
  EXPECT_EQ(parse_config(tokens, "run.yaml", {{"train.tokens", "none"}}).train.tokens, std::nullopt);
  const std::string both = std::string(kMinimal) + "train: {steps: 7, tokens: 900}\n";
  EXPECT_THAT(testing::error_of([&] { parse_config(both, "run.yaml", {}); }), HasSubstr("found both"));
  EXPECT_THAT(parse_error(kMinimal, {{"train.steps", "1"}, {"train.tokens", "1"}}), HasSubstr("found both"));
}

TEST(YamlConfig, AStepIsToldInAccumulationOrInSequences) {
  const std::string sequences = std::string(kMinimal) + "train: {global_batch: 8}\n";
  EXPECT_EQ(parse_config(sequences, "run.yaml", {}).train.global_batch, 8);
  EXPECT_EQ(parse_config(sequences, "run.yaml", {{"train.accumulation", "2"}}).train.global_batch, std::nullopt);
  EXPECT_EQ(parse_error(kMinimal, {{"train.accumulation", "1"}, {"train.global_batch", "8"}}),
            "[train.global_batch] expected train.accumulation or train.global_batch; found both; keep one of the two");
}

TEST(YamlConfig, UnknownKeysAreErrorsWithPathPlaceAndNearest) {
  EXPECT_EQ(parse_error("train:\n  batch: 2\n  stepz: 3\n"),
            "[run.yaml:3] unknown key train.stepz; nearest known key: train.steps");
  EXPECT_EQ(parse_error("ofload: {mode: async}\n"), "[run.yaml:1] unknown key ofload; nearest known key: offload");
  EXPECT_EQ(parse_error("offload:\n  swap:\n    mode: 1\n").substr(0, 39), "[run.yaml:2] unknown key offload.swap; ");
  EXPECT_EQ(parse_error(kMinimal, {{"train.stepz", "1"}}),
            "[--train.stepz] unknown key train.stepz; nearest known key: train.steps");
}

TEST(YamlConfig, WhatComesLaterIsUnknownNotIgnored) {
  for (const char* key : {"checkpoint.often", "parallel.shards", "recompute.mod", "optim.ema"}) {
    EXPECT_THAT(parse_error(kMinimal, {{key, "1"}}), HasSubstr("unknown key"));
  }
}

TEST(YamlConfig, StructureErrorsNameTheLine) {
  EXPECT_THAT(parse_error("train:\n  steps: 1\n  steps: 2\n"), HasSubstr("[run.yaml:3] train.steps is given twice"));
  EXPECT_THAT(parse_error("train: 5\n"), HasSubstr("train: expected a section of keys; found a plain value"));
  EXPECT_THAT(parse_error("- a\n- b\n"), HasSubstr("the run file: expected a section of keys; found a list"));
  EXPECT_THAT(parse_error("model: {path: [a, b]}\n"),
              HasSubstr("[run.yaml:1] model.path: expected a text; found the list [a, b]"));
  EXPECT_THAT(parse_error("model: {path: m}\nmodel: {path: m}\n"),
              HasSubstr("[run.yaml:2] model is given twice; keep one"));
  EXPECT_THAT(parse_error("train:\n  steps: {a: 1}\n"), HasSubstr("train.steps: expected a value; found a section"));
  EXPECT_THAT(parse_error("train:\n  steps:\n"), HasSubstr("train.steps: expected a value; found nothing"));
  EXPECT_THAT(parse_error("train:\n\tsteps: 1\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(parse_error("train: {steps: 1\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(parse_error("a: 1\n---\nb: 2\n"), HasSubstr("expected one YAML document"));
  EXPECT_THAT(parse_error(""), HasSubstr("[model.path] this key is required"));
  EXPECT_THAT(parse_error(kMinimal, {{"optim.betas", "[0.1, [2]]"}}), HasSubstr("found a nested one"));
}

TEST(YamlConfig, WhatItWritesItReadsBack) {
  RunConfig config = parse_config(kMinimal, "run.yaml",
                                  {{"offload.modules", "[\"model.layers.{*}\", b]"},
                                   {"offload.prefetch", "5000B"},
                                   {"device.d2h", "1.5GB/s"},
                                   {"device.latency", "2500ns"},
                                   {"model.path", "a \"b\\c"},
                                   {"optim.lr", "0.000123"}});
  const std::string text = to_yaml(config);
  EXPECT_EQ(to_yaml(parse_config(text, "again.yaml", {})), text);
  EXPECT_EQ(parse_config(text, "again.yaml", {}).model.path, "a \"b\\c");
}

TEST(YamlConfig, AMissingRunFileIsAUserError) {
  EXPECT_THROW(load_config("/nonexistent/run.yaml", {}), UserError);
  EXPECT_THROW(load_config("/", {}), UserError);
}

TEST(YamlConfig, TextsAreWrittenAsTheyAreReadAlsoWithLineEnds) {
  RunConfig config;
  config.model.path = "a \"b\" \\c";
  config.data.path = "line\nend\ttab\x01";
  config.offload.modules = {"x\n", "model.layers.{*}"};
  const RunConfig again = parse_config(to_yaml(config), "written.yaml", {});
  EXPECT_EQ(again.model.path, config.model.path);
  EXPECT_EQ(again.data.path, config.data.path);
  EXPECT_EQ(again.offload.modules, config.offload.modules);
}

TEST(YamlConfig, AControlCharacterIsAnErrorOfItsLine) {
  EXPECT_THAT(parse_error("model: {path: m}\ndata:\n \x04{path: d}\n"),
              HasSubstr("[run.yaml:3] not valid YAML: expected text; found the control character 4"));
}

TEST(YamlConfig, AliasesAreReadAsWhatTheyStandFor) {
  const RunConfig config = parse_config(
      "model: {path: &where m}\ndata: {path: *where}\noffload: {layers: &some [0, 2-3]}\nrecompute: {layers: *some}\n",
      "run.yaml", {{"recompute.mode", "selective"}});
  EXPECT_EQ(config.data.path, "m");
  EXPECT_THAT(config.recompute.layers, ::testing::ElementsAre("0", "2-3"));
}

// yaml-cpp makes a node that holds itself of the first two; the third would be 10^9 values.
TEST(YamlConfig, AliasesWithoutAnEndAreErrors) {
  for (const char* text : {"offload:\n  layers: &x [*x]\n", "offload: &x\n  layers: {a: [1, *x]}\n"}) {
    EXPECT_EQ(parse_error(text),
              "[run.yaml:2] expected an alias of what is complete before it; found one within what it stands for");
  }
  std::string text = "offload:\n  layers: &a0 [1]\n";
  for (int level = 1; level <= 9; ++level) {
    text += "  x" + std::to_string(level) + ": &a" + std::to_string(level) + " [";
    for (int i = 0; i < 10; ++i) text += (i > 0 ? ", *a" : "*a") + std::to_string(level - 1);
    text += "]\n";
  }
  EXPECT_EQ(parse_error(text),
            "[run.yaml:8] expected at most 1000000 values; found more, counting each alias as what it stands for");
}

// YAML::LoadAll() runs until there is no memory left on each of these.
TEST(YamlConfig, TextThatNoDocumentBeginsWithIsAnError) {
  for (const char* text : {"}", ", init: random}\ndata:\n ", "]\n", "model: {path: m}\n}\n"}) {
    EXPECT_THAT(parse_error(text), HasSubstr("[run.yaml")) << text;
  }
}

}  // namespace
}  // namespace neap::train
