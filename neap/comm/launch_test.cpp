// torch-free
#include "neap/comm/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Environment = std::map<std::string, std::string>;

Launch launch(const Environment& environment) {
  return Launch::from([&](const char* variable) -> const char* {
    const auto found = environment.find(variable);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const Environment& environment) {
  return testing::error_of([&] { launch(environment); });
}

const Environment kTorchrun{{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "node0"},
                            {"MASTER_PORT", "40123"},
                            {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                            {"TORCHELASTIC_RUN_ID", "run-7"},
                            {"TORCHELASTIC_RESTART_COUNT", "2"}};

Environment with(Environment environment, const std::string& name, const std::string& value) {
  environment[name] = value;
  return environment;
}

TEST(Launch, NothingSetMeansOneRank) {
  EXPECT_EQ(launch({}), Launch{});
  EXPECT_EQ(launch({{"MASTER_PORT", "nonsense"}, {"LOCAL_RANK", "3"}}), Launch{}) << "no rank is set";
}

TEST(Launch, ReadsTorchrunsVariables) {
  const Launch expected{.rank = 5,
                        .world = 8,
                        .local_rank = 1,
                        .local_world = 4,
                        .address = "node0",
                        .port = 40'123,
                        .agent_store = true,
                        .run_id = "run-7",
                        .restart = 2};
  EXPECT_EQ(launch(kTorchrun), expected);
}

TEST(Launch, TorchrunsVariablesGoBeforeMpiruns) {
  EXPECT_EQ(launch(with(with(kTorchrun, "OMPI_COMM_WORLD_RANK", "0"), "OMPI_COMM_WORLD_SIZE", "2")).rank, 5);
}

TEST(Launch, ReadsMpirunsVariables) {
  const Launch found = launch({{"OMPI_COMM_WORLD_RANK", "1"},
                               {"OMPI_COMM_WORLD_SIZE", "2"},
                               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(found, (Launch{.rank = 1, .world = 2, .local_rank = 1, .local_world = 2}));
}

TEST(Launch, OneHostIsAssumedWhenNothingSaysOtherwise) {
  EXPECT_EQ(launch({{"RANK", "1"}, {"WORLD_SIZE", "3"}}),
            (Launch{.rank = 1, .world = 3, .local_rank = 1, .local_world = 3}));
}

TEST(Launch, SeveralHostsNeedAnAddress) {
  EXPECT_THAT(error_of({{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "8"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
              HasSubstr("MASTER_ADDR"));
}

TEST(Launch, NamesTheVariableThatIsWrong) {
  const auto wrong = [](const char* name, const char* value) {
    return AllOf(HasSubstr(std::string("expected ") + name), HasSubstr(std::string("found '") + value + "'"));
  };
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, const char*>>{{"RANK", "8"},
                                                                  {"RANK", "-1"},
                                                                  {"RANK", "two"},
                                                                  {"RANK", ""},
                                                                  {"RANK", "1 "},
                                                                  {"WORLD_SIZE", "0"},
                                                                  {"WORLD_SIZE", "99999999999"},
                                                                  {"LOCAL_RANK", "4"},
                                                                  {"LOCAL_WORLD_SIZE", "9"},
                                                                  {"MASTER_PORT", "0"},
                                                                  {"MASTER_PORT", "65536"},
                                                                  {"TORCHELASTIC_USE_AGENT_STORE", "maybe"},
                                                                  {"TORCHELASTIC_RESTART_COUNT", "1.5"}}) {
    EXPECT_THAT(error_of(with(kTorchrun, name, value)), wrong(name, value));
  }
}

TEST(Launch, HalfASetOfVariablesIsAnError) {
  EXPECT_THAT(error_of({{"RANK", "0"}}), HasSubstr("expected WORLD_SIZE to be set, since RANK is"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}), HasSubstr("expected RANK to be set, since WORLD_SIZE is"));
  EXPECT_THAT(error_of({{"OMPI_COMM_WORLD_SIZE", "2"}}), HasSubstr("expected OMPI_COMM_WORLD_RANK to be set"));
}

}  // namespace
}  // namespace neap::comm
