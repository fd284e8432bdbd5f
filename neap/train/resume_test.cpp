// Runs that go on from a checkpoint: what they share with one that never stopped, and what they may not change.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/test_support.h"
#include "neap/train/adamw.h"
#include "neap/train/checkpoints.h"
#include "neap/train/resumption.h"
#include "neap/train/schema.h"
#include "neap/train/test_support.h"
#include "neap/train/trainer.h"
#include "testing/error_of.h"
#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::train {
namespace {

using checkpoint::TemporaryDirectory;
using ::testing::AllOf;
using testing::bit_equal;
using testing::error_of;
using ::testing::HasSubstr;

class Embedding : public torch::nn::Module {
 public:
  Embedding(double scale, c10::Device device)
      : weight(register_parameter("weight", values({256, 4}, scale).to(device))),
        bias(register_parameter("bias", values({4}, scale).to(device))) {}
  at::Tensor weight, bias;

 private:
  static at::Tensor values(at::IntArrayRef sizes, double scale) {
    return at::randn(sizes, at::detail::createCPUGenerator(1)) * scale;
  }
};

// A run of small steps that draws random numbers in each of them, on the device and on the CPU.
struct ToyRun {
  RunConfig config;
  TokenFile file;
  Sequences sequences;
  Embedding model;
  AdamW optimizer;
  std::optional<Checkpoints> checkpoints;
  std::optional<Trainer> trainer;
  std::vector<double> losses, norms;

  ToyRun(const std::filesystem::path& dir, c10::Device device, const std::string& resume, double scale = 1)
      : config(make_config(dir, resume)),
        file(TokenFile::open(text(dir))),
        sequences(file, {.length = 8, .shuffle = true, .seed = 3}),
        model(scale, device),
        optimizer(model.parameters(), {}) {
    seed(c10::kCPU, static_cast<uint64_t>(scale * 100));
    seed(device, static_cast<uint64_t>(scale * 200));
    checkpoints.emplace(config, "{}", sequences, nullptr);
    checkpoints->restore(state());
    const Taken start = checkpoints->start();
    const auto loss = [this](const at::Tensor& inputs, const at::Tensor&, double divisor) {
      const at::Tensor x = at::embedding(model.weight, inputs) * at::randn({4}).to(model.weight.device()) + model.bias;
      return at::dropout(x, 0.5, true).square().sum() / divisor;
    };
    trainer.emplace(Trainer::Parts{.loss = loss,
                                   .sequences = sequences,
                                   .optimizer = optimizer,
                                   .rate = LearningRate(config.optim, config.train.steps),
                                   .device = device::Device::of(device),
                                   .steps_done = start.steps,
                                   .sequences_done = start.sequences},
                    config.train, config.optim.clip);
  }
  ToyRun(const ToyRun&) = delete;
  ToyRun& operator=(const ToyRun&) = delete;

  static RunConfig make_config(const std::filesystem::path& dir, const std::string& resume) {
    RunConfig config;
    config.model.path = config.data.path = "given by the test";
    config.log.dir = dir.string();
    config.train.steps = 10;
    config.train.batch = 2;
    config.train.sequence = 8;
    config.train.accumulation = 2;
    config.train.seed = 3;
    config.optim.lr = 1e-2;
    config.checkpoint.every = 3;
    config.checkpoint.resume = resume;
    return config;
  }
  static void seed(c10::Device device, uint64_t seed) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    generator.set_current_seed(seed);
  }
  static std::filesystem::path text(const std::filesystem::path& dir) {
    std::string text;
    for (int i = 0; i < 700; ++i) text.push_back(static_cast<char>('a' + i * i % 23));
    checkpoint::write_file(dir / "text.txt", text);
    return dir / "text.txt";
  }

  ModelState state() {
    return {.model = model, .sharded = nullptr, .optimizer = optimizer, .device = model.weight.device()};
  }
  Taken taken() const { return {.steps = trainer->steps_done(), .sequences = trainer->sequences_done()}; }
  ToyRun& steps(int count) {
    for (int i = 0; i < count; ++i) {
      const StepMetrics metrics = trainer->step();
      losses.push_back(metrics.loss);
      norms.push_back(metrics.grad_norm);
      checkpoints->after_step(state(), taken());
    }
    return *this;
  }
  void finish() { checkpoints->finish(state(), taken()); }
};

template <class T>
std::vector<T> from(const std::vector<T>& all, std::ptrdiff_t first) {
  return {all.begin() + first, all.end()};
}

struct Resuming : testing::SimTest {
  TemporaryDirectory straight, broken;
};

TEST_F(Resuming, HasTheBitsOfARunThatNeverStopped) {
  for (const c10::Device device : {c10::Device(c10::kCPU), testing::sim()}) {
    SCOPED_TRACE(device.str());
    const TemporaryDirectory one, two;
    ToyRun whole(one.path(), device, "none");
    whole.steps(10).finish();
    {
      ToyRun first(two.path(), device, "none");
      first.steps(7);
      first.checkpoints->complete();
    }
    ToyRun second(two.path(), device, "auto", /*scale=*/2);  // other parameters, other seeds
    EXPECT_EQ(second.checkpoints->start().steps, 6);
    EXPECT_EQ(second.checkpoints->start().sequences, 6 * 4);
    second.steps(4).finish();
    EXPECT_EQ(second.losses, from(whole.losses, 6));
    EXPECT_EQ(second.norms, from(whole.norms, 6));
    EXPECT_TRUE(bit_equal(second.model.weight.detach().cpu(), whole.model.weight.detach().cpu()));
    EXPECT_TRUE(bit_equal(second.model.bias.detach().cpu(), whole.model.bias.detach().cpu()));
    EXPECT_NE(whole.losses[0], whole.losses[1]);
    // The state at the end is the same as well, moments and generators and all.
    checkpoint::Reader expected(one.path() / "checkpoints" / checkpoint::step_name(10));
    checkpoint::Reader found(two.path() / "checkpoints" / checkpoint::step_name(10));
    for (const auto& [name, tensor] : expected.index().tensors) {
      EXPECT_TRUE(bit_equal(found.tensor(name), expected.tensor(name))) << name;
    }
    EXPECT_EQ(expected.index().tensors.size(), device.is_cpu() ? 9 : 10);
  }
}

TEST_F(Resuming, WithoutARestoreTheNumbersAreOthers) {
  ToyRun whole(straight.path(), c10::kCPU, "none");
  ToyRun other(broken.path(), c10::kCPU, "none", /*scale=*/2);
  EXPECT_NE(whole.steps(1).losses, other.steps(1).losses);
}

TEST_F(Resuming, AutoBeginsAtTheBeginningWhereThereIsNothing) {
  const ToyRun run(broken.path(), c10::kCPU, "auto");
  EXPECT_EQ(run.checkpoints->start().steps, 0);
  EXPECT_THAT(run.checkpoints->resume_line(), HasSubstr("from the beginning"));
}

TEST_F(Resuming, FromAPathAndFromADirectory) {
  ToyRun(straight.path(), c10::kCPU, "none").steps(6).finish();
  const auto dir = straight.path() / "checkpoints";
  EXPECT_EQ(ToyRun(broken.path(), c10::kCPU, (dir / checkpoint::step_name(3)).string()).checkpoints->start().steps, 3);
  EXPECT_EQ(ToyRun(broken.path(), c10::kCPU, dir.string()).checkpoints->start().steps, 6);
  EXPECT_THAT(error_of([&] { ToyRun(broken.path(), c10::kCPU, "nowhere"); }), HasSubstr("at nowhere; found nothing"));
}

TEST_F(Resuming, DoesNotMixWithCheckpointsOfAnotherRun) {
  ToyRun(straight.path(), c10::kCPU, "none").steps(6).finish();
  EXPECT_THAT(error_of([&] { ToyRun(straight.path(), c10::kCPU, "none"); }),
              AllOf(HasSubstr("[checkpoint.dir]"), HasSubstr("step-00000006 is of an earlier run")));
  const auto earlier = straight.path() / "checkpoints" / checkpoint::step_name(3);
  EXPECT_THAT(error_of([&] { ToyRun(straight.path(), c10::kCPU, earlier.string()); }),
              AllOf(HasSubstr("expected no checkpoint after step 3"), HasSubstr("step-00000006")));
}

TEST_F(Resuming, ChecksWhatItGoesOnWith) {
  ToyRun run(straight.path(), c10::kCPU, "none");
  run.steps(3).finish();
  const auto error = [&](const std::function<void(RunConfig&)>& change, const std::string& model = "{}") {
    RunConfig config = run.config;
    config.checkpoint.resume = "auto";
    change(config);
    return error_of([&] { Checkpoints(config, model, run.sequences, nullptr); });
  };
  EXPECT_EQ(error([](RunConfig&) {}), testing::kNoError);
  EXPECT_THAT(error([](RunConfig& c) { c.train.seed = 4; }), HasSubstr("[train.seed] expected 3, with which "));
  EXPECT_THAT(error([](RunConfig& c) { c.train.sequence = 4; }), HasSubstr("[train.sequence] expected 8"));
  EXPECT_THAT(error([](RunConfig& c) { c.data.shuffle = false; }), HasSubstr("[data.shuffle] expected true"));
  EXPECT_THAT(error([](RunConfig& c) { c.optim.betas[0] = 0.5; }), HasSubstr("[optim.betas]"));
  EXPECT_THAT(error([](RunConfig& c) { c.train.steps = 2; }), HasSubstr("[train.steps] expected at least 3"));
  EXPECT_THAT(error([](RunConfig&) {}, "{\"other\": 1}"), HasSubstr("[model.path] the model of "));
  EXPECT_EQ(error([](RunConfig& c) {
              c.train.steps = 20;
              c.train.batch = 1;
              c.train.accumulation = 4;
              c.offload.options.mode = offload::Mode::kAsync;
              c.recompute.mode = RecomputeMode::kFull;
              c.parallel.shard = 4;
              c.log.trace = true;
            }),
            testing::kNoError);
  const Sequences others(run.file, {.length = 8, .shuffle = true, .seed = 4});
  RunConfig config = run.config;
  config.checkpoint.resume = "auto";
  EXPECT_THAT(error_of([&] { Checkpoints(config, "{}", others, nullptr); }), HasSubstr("[data.path]"));
}

TEST_F(Resuming, AdaptersAreThoseItBeganWith) {
  ToyRun run(straight.path(), c10::kCPU, "none");
  const std::map<std::string, std::string> began = {{"lora.rank", "8"},
                                                    {"lora.alpha", "16"},
                                                    {"lora.dropout", "0"},
                                                    {"lora.modules", "layers.0.q_proj layers.0.v_proj"},
                                                    {"lora.adapter", "one with checksum 1f"}};
  RunConfig config = run.config;
  config.lora.adapter = "mine";
  config.log.dir = broken.path().string();
  {
    Checkpoints checkpoints(config, "{}", run.sequences, nullptr, began);
    run.steps(3);
    checkpoints.finish(run.state(), run.taken());
  }
  config.checkpoint.resume = "auto";
  const auto error = [&](const std::map<std::string, std::string>& now) {
    return error_of([&] { Checkpoints(config, "{}", run.sequences, nullptr, now); });
  };
  const auto with = [&](const std::string& key, const std::string& value) {
    auto changed = began;
    changed[key] = value;
    return changed;
  };
  EXPECT_EQ(error(began), testing::kNoError);
  EXPECT_THAT(error(with("lora.alpha", "32")),
              AllOf(HasSubstr("[lora.alpha] expected 16, with which "), HasSubstr("found 32 (lora.adapter: mine)")));
  EXPECT_THAT(error(with("lora.rank", "4")), HasSubstr("[lora.rank] expected 8, with which "));
  EXPECT_THAT(error(with("lora.dropout", "0.1")), HasSubstr("[lora.dropout] expected 0, with which "));
  EXPECT_THAT(error(with("lora.modules", "layers.0.q_proj")),
              HasSubstr("[lora.modules] expected layers.0.v_proj among them, with which "));
  EXPECT_THAT(error(with("lora.modules", "layers.0.k_proj layers.0.q_proj layers.0.v_proj")),
              HasSubstr("[lora.modules] expected no layers.0.k_proj among them, with which "));
  EXPECT_THAT(error(with("lora.adapter", "one with checksum 2e")),
              HasSubstr("[lora.adapter] expected one with checksum 1f, with which "));
  EXPECT_THAT(error({}), AllOf(HasSubstr("[lora.adapter] expected one with"), HasSubstr("found none")));
}

TEST(MayChange, EveryKeyIsOnOneSide) {
  for (const char* key : {"train.steps", "train.batch", "device.type", "offload.mode", "recompute.mode",
                          "parallel.shard", "checkpoint.every", "log.dir", "lora.adapter", "model.path", "data.path"}) {
    EXPECT_NE(find_key(key), nullptr) << key;
    EXPECT_TRUE(may_change(key)) << key;
  }
  for (const char* key : {"train.seed", "train.sequence", "lora.rank", "lora.alpha", "lora.dropout", "lora.modules",
                          "data.shuffle", "data.documents", "data.end_token", "model.mtp", "train.mtp_weight",
                          "optim.lr", "optim.schedule", "parallel.reduce_op"}) {
    EXPECT_NE(find_key(key), nullptr) << key;
    EXPECT_FALSE(may_change(key)) << key;
  }
  EXPECT_FALSE(may_change("a.key_that_comes_later"));
}

TEST(MetricsFileOfAResumedRun, KeepsTheLinesBeforeIt) {
  const TemporaryDirectory temporary;
  const auto path = temporary.path() / "metrics.jsonl";
  {
    MetricsFile file(path);
    for (int64_t number = 1; number <= 4; ++number) file.write(step(number, 1, 50));
  }
  std::ofstream(path, std::ios::app) << "{\"step\": 2, \"lo";  // where it was killed
  MetricsFile(path, /*kept=*/2).write(step(3, 7, 50));
  std::ifstream in(path);
  std::vector<std::pair<int, double>> found;
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line);
    found.emplace_back(json["step"], json["loss"]);
  }
  EXPECT_THAT(found, ::testing::ElementsAre(std::pair(1, 1.0), std::pair(2, 1.0), std::pair(3, 7.0)));
  MetricsFile(path).write(step(1, 1, 50));
  EXPECT_EQ(std::ranges::count(checkpoint::read_file(path), '\n'), 1);
}

}  // namespace
}  // namespace neap::train
