// torch-free
#include "neap/autograd/unit_selection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::autograd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Four layers, each with attention and mlp, beside an embedding and a head that cannot be units.
ModelNames decoder() {
  ModelNames names;
  names.modules = {"", "model", "model.embed_tokens", "model.layers"};
  for (const char* i : {"0", "1", "2", "3"}) {
    const std::string layer = std::string("model.layers.") + i;
    for (const std::string& unit : {layer, layer + ".self_attn", layer + ".mlp"}) {
      names.modules.push_back(unit);
      names.units.push_back(unit);
    }
  }
  names.modules.push_back("lm_head");
  return names;
}

std::vector<std::string> selected(const std::vector<std::string>& patterns, const ModelNames& names = decoder()) {
  std::vector<std::string> chosen;
  for (const size_t i : select_units(names, patterns, "offload")) chosen.push_back(names.units[i]);
  return chosen;
}

std::string error_of(const std::vector<std::string>& patterns, const ModelNames& names = decoder()) {
  return testing::error_of([&] { select_units(names, patterns, "offload"); });
}

const auto kLayers = {"model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"};

TEST(Selection, BracesMatchEveryChildOfWhatIsBeforeThem) {
  EXPECT_THAT(selected({"model.layers.{*}"}), ::testing::ElementsAreArray(kLayers));
}

TEST(Selection, TextAfterBracesBelongsToThePattern) {
  EXPECT_THAT(selected({"model.layers.{*}.mlp"}),
              ElementsAre("model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp", "model.layers.3.mlp"));
}

TEST(Selection, BracesNeedThePathBeforeThem) {
  EXPECT_THAT(error_of({"model.layer.{*}"}),
              HasSubstr("expected a module named 'model.layer'; found none; the nearest is "
                        "'model.layers'"));
  EXPECT_THAT(error_of({"model.la{*}"}), HasSubstr("expected {*} alone between dots"));
}

TEST(Selection, AGlobNeverReachesIntoALayer) {
  EXPECT_THAT(selected({"model.layers.*"}), ::testing::ElementsAreArray(kLayers));
  EXPECT_THAT(selected({"model.layers.[0-1].m*"}), ElementsAre("model.layers.0.mlp", "model.layers.1.mlp"));
  EXPECT_THAT(selected({"*.layers.?.self_attn"}).size(), 4);
}

TEST(Selection, IndicesCountTheModelsOwnLayers) {
  EXPECT_THAT(selected({"0-2"}), ElementsAre("model.layers.0", "model.layers.1", "model.layers.2"));
  EXPECT_THAT(selected({"2-1"}), ElementsAre("model.layers.1", "model.layers.2"));
  EXPECT_THAT(selected({"3"}), ElementsAre("model.layers.3"));
}

TEST(Selection, OverlapsAreMergedAndAUnitIsChosenOnce) {
  EXPECT_THAT(selected({"0-1", "1-2", "model.layers.1", "model.layers.*"}), ::testing::ElementsAreArray(kLayers));
}

TEST(Selection, IndicesOutOfRangeAreErrorsThatNameTheRange) {
  EXPECT_THAT(error_of({"0-4"}), HasSubstr("expected indices from 0 to 3; found '0-4'"));
  EXPECT_THAT(error_of({"99999999999999999999"}), HasSubstr("expected an index or a range"));
  EXPECT_THAT(error_of({"-1"}), HasSubstr("expected an index or a range"));
  EXPECT_THAT(error_of({"1-2-3"}), HasSubstr("expected an index or a range"));
}

TEST(Selection, ErrorsBeginWithTheSectionThatAsked) {
  const auto error_in = [](const char* section, const std::string& pattern) -> std::string {
    try {
      select_units(decoder(), {pattern}, section);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(error_in("recompute", "9"), HasSubstr("[recompute.layers] expected indices from 0 to 3"));
  EXPECT_THAT(error_in("parallel", "decoder"), HasSubstr("[parallel.modules] pattern 'decoder' matches no module"));
}

TEST(Selection, NoPatternMeansTheModelsOwnListOfLayers) {
  EXPECT_THAT(selected({}), ::testing::ElementsAreArray(kLayers));
  ModelNames plain{{"", "encoder", "decoder"}, {"encoder", "decoder"}};
  EXPECT_THAT(error_of({}, plain), HasSubstr("expected a model with a list of layers"));
}

TEST(Selection, LayersAreOrderedByNumberNotByText) {
  std::vector<std::string> units;
  for (const char* name : {"h.10", "h.2", "h.1", "h.0"}) units.emplace_back(name);
  EXPECT_THAT(layer_list(units), ElementsAre(3, 2, 1, 0));
}

TEST(Selection, TheListNearestToTheRootWinsOverTheExpertsInside) {
  std::vector<std::string> units = {"layers.0", "layers.1"};
  for (int i = 0; i < 8; ++i) units.push_back("layers.0.experts." + std::to_string(i));
  EXPECT_THAT(layer_list(units), ElementsAre(0, 1));
}

TEST(Selection, WhatTheModelCallsItsLayersWinsOverListsThatAreNearer) {
  ModelNames names{.modules = {"heads.0", "body.blocks.0", "body.norm", "body.blocks.1"}, .units = {}};
  names.units = names.modules;
  EXPECT_THAT(selected({}, names), ElementsAre("heads.0"));
  names.layers = {"body.blocks.0", "body.norm", "body.blocks.1"};
  EXPECT_THAT(selected({}, names), ElementsAre("body.blocks.0", "body.norm", "body.blocks.1"));
  EXPECT_THAT(selected({"1"}, names), ElementsAre("body.blocks.1"));  // of those that are numbered
  EXPECT_THAT(error_of({"2"}, names), HasSubstr("expected indices from 0 to 1; found '2'"));
}

TEST(Selection, EveryUnmatchedPatternIsAnErrorNamingTheNearestUnit) {
  EXPECT_THAT(error_of({"model.layers.{*}", "model.layers.0.mpl"}),
              HasSubstr("pattern 'model.layers.0.mpl' matches no module; the nearest is 'model.layers.0.mlp'"));
  EXPECT_THAT(error_of({"lm_head"}), HasSubstr("matches 'lm_head', which has no hook point"));
  EXPECT_THAT(error_of({""}), HasSubstr("found an empty text"));
  EXPECT_THAT(error_of({"x"}, ModelNames{{"", "y"}, {}}), HasSubstr("this model has none"));
}

TEST(Selection, WhatRunsAfterTheUnitsIsTheOutermostThatFollows) {
  const std::vector<std::string> units = {"",         "embed",        "layers.0",      "layers.0.mlp",
                                          "layers.1", "layers.1.mlp", "layers.1.norm", "layersnorm",
                                          "norm",     "head",         "head.0",        "head.0.x"};
  const auto after = [&](const std::vector<size_t>& chosen) {
    std::vector<std::string> names;
    for (const size_t i : units_after(units, chosen)) names.push_back(units[i]);
    return names;
  };
  EXPECT_THAT(after({2, 4}), ElementsAre("layersnorm", "norm", "head"));
  EXPECT_THAT(after({4, 2}), ElementsAre("layersnorm", "norm", "head"));
  EXPECT_THAT(after({2}), ElementsAre("layers.1", "layersnorm", "norm", "head"));
  EXPECT_THAT(after({3, 5}), ElementsAre("layers.1.norm", "layersnorm", "norm", "head"));
  EXPECT_THAT(after({4, 5}), ElementsAre("layersnorm", "norm", "head"));  // a unit in a unit
  EXPECT_THAT(after({10}), ElementsAre());
  EXPECT_THAT(after({0}), ElementsAre());  // everything is in the root
  EXPECT_THAT(after({}), ElementsAre());
}

TEST(Selection, GlobsMatchWithinOneSegment) {
  EXPECT_TRUE(glob_matches("*", ""));
  EXPECT_TRUE(glob_matches("a*b*c", "aXbYbc"));
  EXPECT_FALSE(glob_matches("a*b*c", "aXbYb"));
  EXPECT_TRUE(glob_matches("[!0-3]?", "47"));
  EXPECT_FALSE(glob_matches("[!0-3]", "2"));
  EXPECT_TRUE(glob_matches("[", "["));
  EXPECT_FALSE(glob_matches("?", ""));
}

}  // namespace
}  // namespace neap::autograd
