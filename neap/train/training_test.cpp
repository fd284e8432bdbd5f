// Whole training steps of a small random Llama: on the CPU, on the simulated accelerator, with and without offload.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "neap/models/causal_lm.h"
#include "neap/offload/engine.h"
#include "neap/recompute/recompute.h"
#include "neap/train/adamw.h"
#include "neap/train/trainer.h"
#include "testing/llama_config.h"
#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::train {
namespace {

using namespace literals;

models::ModelConfig tiny() {
  models::ModelConfig config = testing::small_llama(/*vocabulary=*/256);  // bytes
  config.tie_word_embeddings = true;
  return config;
}

offload::Options offload_everything(offload::Mode mode) {
  return {.mode = mode, .min_bytes = 0_B, .prefetch = offload::Layers{1}, .keep_last = 0, .max_in_flight = 0_B};
}

TokenFile some_text() {
  std::string path = (std::filesystem::temp_directory_path() / "neap-training-XXXXXX").string();
  const int descriptor = ::mkstemp(path.data());
  uint32_t state = 12345;
  for (int i = 0; i < 4000; ++i) {
    state = state * 1664525 + 1013904223;
    const char c = static_cast<char>('a' + (state >> 24) % 26);
    EXPECT_EQ(::write(descriptor, &c, 1), 1);
  }
  ::close(descriptor);
  TokenFile file = TokenFile::open(path);
  std::filesystem::remove(path);
  return file;
}

// Everything a run of some steps needs, on one device.
struct Training {
  TokenFile file = some_text();
  Sequences sequences{file, {.length = 24, .shuffle = true, .seed = 5}};
  std::shared_ptr<models::CausalLM> model;
  std::optional<offload::Engine> engine;
  std::optional<recompute::Recompute> recompute;
  std::optional<AdamW> optimizer;
  std::optional<Trainer> trainer;
  std::vector<StepMetrics> steps;

  explicit Training(c10::Device device, std::optional<offload::Options> options = std::nullopt,
                    const std::vector<std::string>& recomputed = {}) {
    model = models::make_model(tiny(), at::TensorOptions().device(device), 7);
    if (options) {
      engine.emplace(*options);
      engine->attach(*model);
    }
    if (!recomputed.empty()) {
      recompute.emplace();
      recompute->attach(*model, recomputed);
    }
    optimizer.emplace(model->parameters(), AdamW::Options{});
    OptimSection optim;
    optim.lr = 1e-2;
    TrainSection train;
    train.batch = 2;
    train.sequence = 24;
    train.accumulation = 2;
    trainer.emplace(Trainer::Parts{.loss =
                                       [this](const at::Tensor& inputs, const at::Tensor& labels, double divisor) {
                                         models::LossOptions loss;
                                         loss.divisor = divisor;
                                         return model->loss(inputs, labels, loss);
                                       },
                                   .sequences = sequences,
                                   .optimizer = *optimizer,
                                   .rate = LearningRate(optim, 10),
                                   .device = device::Device::of(device),
                                   .engine = engine ? &*engine : nullptr,
                                   .recompute = recompute ? &*recompute : nullptr,
                                   .device_has_clock = device.type() == testing::kSim},
                    train, 1.0);
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  Training& run(int count) {
    for (int i = 0; i < count; ++i) steps.push_back(trainer->step());
    return *this;
  }
};

void expect_equal_to_the_last_bit(const Training& a, const Training& b) {
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_EQ(a.steps[i].loss, b.steps[i].loss) << "step " << i + 1;
    EXPECT_EQ(a.steps[i].grad_norm, b.steps[i].grad_norm) << "step " << i + 1;
  }
  const auto ours = a.model->parameters();
  const auto theirs = b.model->parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(testing::bit_equal(ours[i].detach().cpu(), theirs[i].detach().cpu())) << "parameter " << i;
  }
}

// Autograd starts its device threads with the first backward of the process, for the devices it knows then.
class RegisterSimFirst : public ::testing::Environment {
 public:
  void SetUp() override { testing::sim_control(); }
};
const auto* const register_sim_first = ::testing::AddGlobalTestEnvironment(new RegisterSimFirst);

class TrainingTest : public testing::SimTest {};

TEST_F(TrainingTest, TheLossFalls) {
  Training training(c10::kCPU);
  training.run(10);
  EXPECT_LT(training.steps.back().loss, training.steps.front().loss - 0.5);
}

TEST_F(TrainingTest, TheSimulatedAcceleratorComputesWhatTheCpuDoes) {
  Training cpu(c10::kCPU);
  Training sim(testing::sim());
  expect_equal_to_the_last_bit(cpu.run(3), sim.run(3));
}

TEST_F(TrainingTest, OffloadChangesNoBitOfTenSteps) {
  Training plain(testing::sim());
  plain.run(10);
  for (const offload::Mode mode : {offload::Mode::kAsync, offload::Mode::kSync}) {
    Training offloaded(testing::sim(), offload_everything(mode));
    offloaded.run(10);
    expect_equal_to_the_last_bit(plain, offloaded);
    for (const StepMetrics& step : offloaded.steps) {
      EXPECT_GT(step.offloaded_bytes, 0_B);
      EXPECT_GT(step.reloaded_bytes, 0_B);
      EXPECT_LE(step.reloaded_bytes, step.offloaded_bytes);  // what is still there need not come back
      EXPECT_GT(step.planned_drop, 0_B);
      EXPECT_EQ(step.measured_drop, step.planned_drop);
    }
  }
}

// On a device this slow the host is far ahead of it, and the update is queued when the host has done its part.
TEST_F(TrainingTest, TheDevicesStepTimeIsThatOfAllWorkOfTheStep) {
  configure([](sim::DeviceConfig& config) { config.gflops = config.hbm_gbps = 1; });
  Training training(testing::sim());
  for (int step = 0; step < 2; ++step) {
    synchronize();
    control().reset_counters(0);
    const double milliseconds = *training.run(1).steps.back().device_step_ms;
    const double busy = static_cast<double>(control().counters(0).kernel_busy_ns) * 1e-6;
    EXPECT_GE(milliseconds, busy) << step;
    EXPECT_LT(milliseconds, 1.1 * busy) << step;
  }
}

TEST_F(TrainingTest, TellsWhatThePeakIsMadeOf) {
  const auto parts_of = [](std::optional<offload::Options> options) {
    Training training(testing::sim(), std::move(options));
    training.run(2);
    Bytes parameters;
    for (const at::Tensor& p : training.model->parameters()) parameters += Bytes(static_cast<int64_t>(p.nbytes()));
    for (const StepMetrics& step : training.steps) {
      EXPECT_EQ(step.peak_parts.value().total(), step.device_peak);
      EXPECT_EQ(step.peak_parts->parameters, parameters);
      EXPECT_EQ(step.peak_parts->optimizer, training.optimizer->state_bytes());
      EXPECT_LE(step.peak_parts->gradients, parameters);
    }
    return *training.steps.back().peak_parts;
  };
  const PeakParts plain = parts_of(std::nullopt);
  const PeakParts offloaded = parts_of(offload_everything(offload::Mode::kAsync));
  EXPECT_GT(plain.activations, plain.parameters);
  EXPECT_LT(offloaded.activations, plain.activations);
  EXPECT_EQ(plain.place, "");
  EXPECT_THAT(offloaded.place, ::testing::HasSubstr("model.layers."));
}

TEST_F(TrainingTest, RecomputationChangesNoBitOfTenStepsAloneAndWithOffload) {
  Training plain(testing::sim());
  plain.run(10);
  for (const bool offloaded : {false, true}) {
    std::optional<offload::Options> options;
    if (offloaded) options = offload_everything(offload::Mode::kAsync);
    Training recomputed(testing::sim(), options, {"0-1", "model.layers.2.mlp"});
    recomputed.run(10);
    expect_equal_to_the_last_bit(plain, recomputed);
    for (const StepMetrics& step : recomputed.steps) {
      EXPECT_EQ(step.reruns, 2 * 3);  // two micro-batches
      EXPECT_GT(step.bytes_not_kept, 0_B);
    }
  }
}

TEST_F(TrainingTest, OffloadOnAPlainCpuChangesNoBitEither) {
  Training plain(c10::kCPU);
  Training offloaded(c10::kCPU, offload_everything(offload::Mode::kAsync));
  expect_equal_to_the_last_bit(plain.run(3), offloaded.run(3));
  EXPECT_GT(offloaded.steps.back().offloaded_bytes, 0_B);
  EXPECT_EQ(offloaded.steps.back().device_peak, std::nullopt);
}

TEST_F(TrainingTest, WhatDoesNotFitIsReportedAndFitsWithOffload) {
  const auto run = [](std::optional<offload::Options> options) {
    Training training(testing::sim(), std::move(options));
    training.run(2);
    return training.steps;
  };
  const auto plain = run(std::nullopt);
  const auto offloaded = run(offload_everything(offload::Mode::kAsync));
  const int64_t between = (plain[1].device_peak->count + offloaded[1].device_peak->count) / 2;
  configure([&](sim::DeviceConfig& config) { config.capacity = Bytes(between); });

  try {
    run(std::nullopt);
    FAIL() << "it fitted";
  } catch (const DeviceOutOfMemory& error) {
    EXPECT_THAT(error.shortage().when, ::testing::HasSubstr("of step 1"));
    const MemoryUse& use = error.shortage().use;
    EXPECT_EQ(use.capacity, Bytes(between));
    EXPECT_GT(use.parameters, 0_B);
    EXPECT_GT(use.activations(), use.parameters);
    EXPECT_LE(use.peak, use.capacity);
  }
  const auto fitted = run(offload_everything(offload::Mode::kAsync));
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(fitted[i].loss, plain[i].loss);
    EXPECT_EQ(fitted[i].grad_norm, plain[i].grad_norm);
    EXPECT_LE(fitted[i].device_peak, Bytes(between));
  }
}

}  // namespace
}  // namespace neap::train
