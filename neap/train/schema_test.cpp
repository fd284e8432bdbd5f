// torch-free
#include "neap/train/schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "neap/base/error.h"
#include "testing/error_of.h"

namespace neap::train {
namespace {

using ::testing::HasSubstr;

RawValue scalar(const std::string& text) { return {.items = {text}, .is_list = false, .place = "t.yaml:3"}; }
RawValue list(std::vector<std::string> items) {
  return {.items = std::move(items), .is_list = true, .place = "t.yaml:3"};
}

RunConfig with(const std::string& path, const RawValue& value) {
  RunConfig config;
  find_key(path)->set(config, value);
  return config;
}

std::string error_of(const std::string& path, const RawValue& value) {
  return testing::error_of([&] { with(path, value); });
}

RunConfig complete() {
  RunConfig config;
  config.model.path = "model";
  config.data.path = "data";
  return config;
}

std::string check_error(const RunConfig& config) {
  return testing::error_of([&] { check(config); });
}

TEST(Schema, EveryKeyHasOnePathAHelpATypeAndADefaultItAcceptsItself) {
  std::set<std::string> paths;
  for (const Key& key : keys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    EXPECT_THAT(key.path, HasSubstr("."));
    EXPECT_FALSE(key.help.empty()) << key.path;
    EXPECT_FALSE(key.type.empty()) << key.path;
    const std::string shown = key.show(RunConfig{});
    if (shown.starts_with('[') || shown.starts_with('"')) continue;  // YAML syntax: see yaml_config_test.cpp
    EXPECT_EQ(key.show(with(key.path, scalar(shown))), shown) << key.path;
  }
}

TEST(Schema, ABadValueNamesPlacePathRangeAndFinding) {
  EXPECT_EQ(error_of("train.steps", scalar("ten")),
            "[t.yaml:3] train.steps: expected an integer from 1 to 1000000000; found \"ten\"");
  EXPECT_THAT(error_of("train.steps", scalar("0")), HasSubstr("found \"0\""));
  EXPECT_THAT(error_of("train.steps", scalar("1.5")), HasSubstr("expected an integer"));
  EXPECT_THAT(error_of("train.steps", scalar("")), HasSubstr("found \"\""));
  EXPECT_THAT(error_of("train.steps", scalar("99999999999999999999")), HasSubstr("expected an integer"));
  EXPECT_THAT(error_of("train.steps", list({"1", "2"})), HasSubstr("found the list [1, 2]"));
}

TEST(Schema, NumbersMustBeFiniteAndInRange) {
  EXPECT_DOUBLE_EQ(with("optim.lr", scalar("1e-4")).optim.lr, 1e-4);
  EXPECT_DOUBLE_EQ(with("optim.lr", scalar("+.5")).optim.lr, 0.5);
  for (const char* bad : {"nan", ".nan", "inf", "-0.1", "1001", "1e400", "0x10", "1e-4 "}) {
    EXPECT_THAT(error_of("optim.lr", scalar(bad)), HasSubstr("optim.lr: expected a number from 0 to 1000")) << bad;
  }
  EXPECT_THAT(error_of("optim.clip", scalar("-1")), HasSubstr("a number at least 0"));
}

TEST(Schema, ChoicesListWhatIsAllowed) {
  EXPECT_EQ(with("offload.mode", scalar("async")).offload.options.mode, offload::Mode::kAsync);
  EXPECT_EQ(error_of("offload.mode", scalar("on")),
            "[t.yaml:3] offload.mode: expected off, sync or async; found \"on\"");
  EXPECT_THAT(error_of("data.shuffle", scalar("yes")), HasSubstr("expected true or false"));
}

TEST(Schema, SizesRatesAndTimesCarryUnits) {
  EXPECT_EQ(with("device.capacity", scalar("1.5GiB")).device.capacity, Bytes(1610612736));
  EXPECT_EQ(with("device.capacity", scalar("0")).device.capacity, Bytes(0));
  EXPECT_EQ(with("device.capacity", scalar("unlimited")).device.capacity, std::nullopt);
  EXPECT_EQ(with("device.d2h", scalar("25GB/s")).device.d2h_per_s, Bytes(25'000'000'000));
  EXPECT_EQ(with("device.d2h", scalar("unlimited")).device.d2h_per_s, Bytes(0));
  EXPECT_EQ(with("device.latency", scalar("2.5us")).device.latency_ns, 2500);
  EXPECT_EQ(with("device.latency", scalar("0")).device.latency_ns, 0);
  EXPECT_EQ(with("offload.host_limit", scalar("2GiB")).offload.options.host_limit, Bytes(int64_t{2} << 30));
  EXPECT_EQ(with("offload.device_limit", scalar("1GiB")).offload.options.device_limit, Bytes(int64_t{1} << 30));
  EXPECT_EQ(with("offload.host_limit", scalar("none")).offload.options.host_limit, std::nullopt);
  for (const char* bad : {"-1", "5 apples", "nan", "1e30"}) {
    EXPECT_THAT(error_of("device.capacity", scalar(bad)), HasSubstr("[t.yaml:3] device.capacity: expected a size"))
        << bad;
  }
  for (const char* bad : {"25", "25GB", "0GB/s", "fast"}) {
    EXPECT_THAT(error_of("device.h2d", scalar(bad)), HasSubstr("device.h2d: expected a rate")) << bad;
  }
  for (const char* bad : {"5", "-1us", "us", "1h30", "1e30s"}) {
    EXPECT_THAT(error_of("device.latency", scalar(bad)), HasSubstr("device.latency: expected a time")) << bad;
  }
}

TEST(Schema, PrefetchIsLayersASizeOrAutomatic) {
  const auto prefetch = [](const char* text) {
    return with("offload.prefetch", scalar(text)).offload.options.prefetch;
  };
  EXPECT_EQ(prefetch("2"), offload::Prefetch(offload::Layers{2}));
  EXPECT_EQ(prefetch("64MiB"), offload::Prefetch(Bytes(64 << 20)));
  EXPECT_EQ(prefetch("automatic"), offload::Prefetch(offload::Automatic{}));
  for (const char* bad : {"auto", "-1", "", "2 layers", "99999999999"}) {
    EXPECT_THAT(error_of("offload.prefetch", scalar(bad)), HasSubstr("offload.prefetch: expected automatic")) << bad;
  }
}

TEST(Schema, KeepLastIsANumberOrAutomatic) {
  EXPECT_EQ(with("offload.keep_last", scalar("3")).offload.options.keep_last, 3);
  EXPECT_EQ(with("offload.keep_last", scalar("automatic")).offload.options.keep_last, std::nullopt);
  EXPECT_THAT(error_of("offload.keep_last", scalar("-1")), HasSubstr("an integer from 0 to 1000000, or automatic"));
}

TEST(Schema, ListsTakeOneValueOrSeveral) {
  EXPECT_THAT(with("offload.modules", scalar("model.layers.{*}")).offload.modules,
              ::testing::ElementsAre("model.layers.{*}"));
  EXPECT_THAT(with("optim.betas", list({"0.8", "0.99"})).optim.betas, ::testing::ElementsAre(0.8, 0.99));
  EXPECT_THAT(error_of("optim.betas", list({"0.9"})), HasSubstr("a list of 2 numbers"));
  EXPECT_THAT(error_of("optim.betas", list({"0.9", "1"})), HasSubstr("each from 0 to less than 1"));
}

TEST(Schema, AnUnknownKeyNamesTheNearestOne) {
  EXPECT_EQ(nearest_key("train.step"), "train.steps");
  EXPECT_EQ(nearest_key("steps"), "train.steps");
  EXPECT_EQ(nearest_key("train.lr"), "optim.lr");
  EXPECT_EQ(nearest_key("offlaod.mode"), "offload.mode");
  EXPECT_EQ(nearest_key("offlaod"), "offload");
  EXPECT_EQ(nearest_key("model.layers.prefetch"), "offload.prefetch");
}

TEST(Schema, KeysThatContradictEachOtherAreErrors) {
  EXPECT_EQ(check_error(complete()), testing::kNoError);
  EXPECT_THAT(check_error(RunConfig{}), HasSubstr("[model.path] this key is required"));
  RunConfig config = complete();
  config.data.path.clear();
  EXPECT_THAT(check_error(config), HasSubstr("[data.path] this key is required"));
  config = complete();
  config.optim.warmup = 101;
  EXPECT_THAT(check_error(config), HasSubstr("[optim.warmup] expected at most train.steps, which is 100; found 101"));
  config = complete();
  config.recompute.mode = RecomputeMode::kSelective;
  EXPECT_THAT(check_error(config), HasSubstr("[recompute.mode] selective needs to be told what"));
  config.recompute.layers = {"0-3"};
  EXPECT_EQ(check_error(config), "no error");
  config.recompute.mode = RecomputeMode::kFull;
  EXPECT_THAT(check_error(config), HasSubstr("[recompute.mode] full is every layer, but"));
  config = complete();
  config.parallel.shard = 0;
  EXPECT_THAT(check_error(config), HasSubstr("[parallel.shard] expected a number of ranks, or -1"));
  config.parallel.shard = 2;
  config.parallel.replicate = 0;
  EXPECT_THAT(check_error(config), HasSubstr("[parallel.replicate] expected a number of copies from 1"));
  config.parallel.replicate = 2;
  EXPECT_EQ(check_error(config), testing::kNoError);
  config.parallel.timeout_ns = 10'000;
  EXPECT_THAT(check_error(config), HasSubstr("[parallel.timeout] expected a time of at least 1ms"));
  config = complete();
  config.device.type = DeviceKind::kSim;
  config.device.index = 2;
  config.device.count = 2;
  EXPECT_THAT(check_error(config), HasSubstr("[device.index] expected less than device.count, which is 2; found 2"));
  config.device.type = DeviceKind::kCpu;
  EXPECT_THAT(check_error(config), HasSubstr("the only cpu"));
}

TEST(Schema, HelpAndPageNameEveryKey) {
  const std::string help = help_text();
  const std::string page = markdown_page();
  for (const Key& key : keys()) {
    EXPECT_THAT(help, HasSubstr("--" + key.path + "="));
    EXPECT_THAT(page, HasSubstr("| `" + key.path.substr(key.path.find('.') + 1) + "` |"));
  }
}

TEST(Schema, TokensBecomeStepsThatTakeThemAllIn) {
  RunConfig config = complete();
  config.train.batch = 2;
  config.train.sequence = 32;
  config.train.accumulation = 3;
  config.train.tokens = 1000;
  EXPECT_EQ(resolve(config, 1).train.steps, 6);  // of 192 tokens
  EXPECT_EQ(resolve(config, 4).train.steps, 2);
  EXPECT_EQ(resolve(config, 1, {.steps = 2, .tokens = 500}).train.steps, 5);
  EXPECT_EQ(resolve(config, 1, {.steps = 20, .tokens = 1001}).train.steps, 20);
  config.train.tokens = 192;
  EXPECT_EQ(resolve(config, 1).train.steps, 1);
  EXPECT_FALSE(resolve(config, 1).train.tokens);
  config.optim.warmup = 2;
  EXPECT_EQ(check_error(config), "no error");
  EXPECT_THAT(testing::error_of([&] { resolve(config, 1); }), HasSubstr("[optim.warmup] expected at most train"));
  config.train.tokens.reset();
  EXPECT_EQ(resolve(config, 8).train.steps, 100);
  // What a run leaves is read again, so it has to be within the range of the key.
  config.train.tokens = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(testing::error_of([&] { resolve(config, 1); }), HasSubstr("[train.tokens] expected at most 1000000000"));
  config.train.batch = config.train.accumulation = 1'000'000;
  config.train.sequence = 10'000'000;
  EXPECT_THAT(testing::error_of([&] { resolve(config, 1); }), HasSubstr("expected a step of less than 2^63 tokens"));
}

TEST(Schema, AGlobalBatchIsDividedAmongTheRanks) {
  RunConfig config = complete();
  config.train.batch = 2;
  config.train.global_batch = 16;
  config.train.tokens = 16 * config.train.sequence;
  EXPECT_EQ(resolve(config, 1).train.accumulation, 8);
  EXPECT_EQ(resolve(config, 4).train.accumulation, 2);
  EXPECT_EQ(resolve(config, 4).train.steps, 1);
  EXPECT_FALSE(resolve(config, 4).train.global_batch);
  EXPECT_EQ(testing::error_of([&] { resolve(config, 3); }),
            "[train.global_batch] expected a multiple of 6, train.batch: 2 of 3 ranks; found 16");
  config.train.global_batch = 4'000'000;
  EXPECT_EQ(resolve(config, 2).train.accumulation, 1'000'000);
  EXPECT_THAT(testing::error_of([&] { resolve(config, 1); }),
              HasSubstr("[train.global_batch] expected at most 1000000 times 2"));
}

TEST(Schema, MomentumBelongsToSgd) {
  RunConfig config = complete();
  config.optim.momentum = 0.9;
  EXPECT_THAT(check_error(config), HasSubstr("[optim.momentum] expected optim.type: sgd beside momentum; found adamw"));
  config.optim.type = OptimType::kSgd;
  EXPECT_EQ(check_error(config), "no error");
  config.optim.momentum = 0;
  config.optim.nesterov = true;
  EXPECT_THAT(check_error(config), HasSubstr("[optim.nesterov] expected optim.momentum above 0"));
}

TEST(Schema, EvaluationNeedsData) {
  RunConfig config = complete();
  config.train.eval_every = 5;
  EXPECT_EQ(check_error(config), "[train.eval_every] expected data.eval beside it: the held-out data; found none");
  config.data.eval = "held-out.bin";
  EXPECT_EQ(check_error(config), "no error");
}

TEST(Schema, OptionalValuesHaveAWordForNone) {
  EXPECT_EQ(with("train.tokens", scalar("1000")).train.tokens, 1000);
  EXPECT_EQ(with("train.tokens", scalar("none")).train.tokens, std::nullopt);
  EXPECT_THAT(error_of("train.tokens", scalar("0")), HasSubstr("expected an integer of at least 1, or none"));
  EXPECT_EQ(with("device.peak_flops", scalar("989e12")).device.peak_flops, 989e12);
  EXPECT_THAT(error_of("device.peak_flops", scalar("-1")), HasSubstr("expected a number above 0, or automatic"));
}

}  // namespace
}  // namespace neap::train
