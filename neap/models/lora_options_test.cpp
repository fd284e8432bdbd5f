// torch-free
#include "neap/models/lora_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "testing/error_of.h"
#include "testing/nested_json.h"

namespace neap::models {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class LoraOptionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "neap-lora-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    file_ = std::filesystem::path(pattern) / "adapter_config.json";
  }
  void TearDown() override { std::filesystem::remove_all(file_.parent_path()); }

  LoraOptions read(const std::string& json) const {
    std::ofstream(file_) << json;
    return read_adapter_config(file_);
  }
  std::string error_with(const std::string& fields) const {
    return error_of([&] { read(R"({"peft_type": "LORA", )" + fields + "}"); });
  }

  std::filesystem::path file_;
};

TEST_F(LoraOptionsTest, TheScaleIsAlphaOverTheRankOrItsRoot) {
  EXPECT_EQ((LoraOptions{.rank = 8, .alpha = 16}.scale()), 2);
  EXPECT_EQ((LoraOptions{.rank = 16, .alpha = 8, .rank_stabilised = true}.scale()), 2);
}

TEST_F(LoraOptionsTest, WhatIsWrittenIsRead) {
  const LoraOptions options{.rank = 4, .alpha = 12.5, .dropout = 0.25, .rank_stabilised = true, .modules = {"a", "b"}};
  const LoraOptions again = read(adapter_config_json(options, "models/base"));
  EXPECT_EQ(again.rank, 4);
  EXPECT_EQ(again.alpha, 12.5);
  EXPECT_EQ(again.dropout, 0.25);
  EXPECT_TRUE(again.rank_stabilised);
  EXPECT_THAT(again.modules, IsEmpty());  // the tensors say it
}

TEST_F(LoraOptionsTest, FieldsThatAreNotThereHavePeftsDefaults) {
  const LoraOptions options = read(R"({"peft_type": "LORA", "use_dora": false, "rank_pattern": {}, "bias": "none"})");
  EXPECT_EQ(options.rank, 8);
  EXPECT_EQ(options.alpha, 8);
  EXPECT_EQ(options.dropout, 0);
  EXPECT_FALSE(options.rank_stabilised);
}

TEST_F(LoraOptionsTest, WhatWouldComputeSomethingElseIsRefusedByItsKey) {
  EXPECT_THAT(error_with(R"("use_dora": true)"), AllOf(HasSubstr("adapter_config.json: "), HasSubstr("no use_dora")));
  EXPECT_THAT(error_with(R"("bias": "all")"),
              HasSubstr(R"(expected "bias": "none": biases are not trained; found "all")"));
  EXPECT_THAT(error_with(R"("modules_to_save": ["lm_head"])"),
              HasSubstr(R"(modules_to_save: it is not supported; found ["lm_head"])"));
  EXPECT_THAT(error_with(R"("rank_pattern": {"q_proj": 4})"), HasSubstr("no rank_pattern"));
  EXPECT_THAT(error_with(R"("r": "eight")"), HasSubstr("expected a number in r; found \"eight\""));
  EXPECT_THAT(error_with(R"("r": 0)"), HasSubstr("expected a rank from 1 to 65536 in r; found 0"));
  EXPECT_THAT(error_with(R"("r": 1e300)"), HasSubstr("expected a rank"));
  EXPECT_THAT(error_with(R"("r": 8.5)"), HasSubstr("expected a rank from 1 to 65536 in r; found 8.5"));
  EXPECT_THAT(error_with(R"("init_lora_weights": "pissa_niter_4")"),
              AllOf(HasSubstr("beside weights that stay as they are"), HasSubstr("found \"pissa_niter_4\"")));
  EXPECT_THAT(error_with(R"("lora_dropout": 1)"), HasSubstr("expected a probability from 0, below 1; found 1"));
  EXPECT_THAT(error_of([&] { read(R"({"peft_type": "LOHA"})"); }), HasSubstr(R"("peft_type": "LORA"; found "LOHA")"));
  EXPECT_THAT(error_of([&] { read("[1]"); }), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of([&] { read("{"); }), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_with("\"bias\": " + testing::nested_json(1'000'000)), HasSubstr("not valid JSON"));
  std::filesystem::remove(file_);
  EXPECT_THAT(error_of([&] { read_adapter_config(file_); }), HasSubstr("cannot be opened"));
}

}  // namespace
}  // namespace neap::models
