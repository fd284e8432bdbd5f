// The step of the trainer on small models of its own; with a real model and offload in training_test.cpp.
#include "neap/train/trainer.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "neap/base/log.h"
#include "neap/base/scope_exit.h"
#include "neap/trace/recorder.h"
#include "neap/train/adamw.h"
#include "neap/train/determinism.h"
#include "testing/error_of.h"

namespace neap::train {
namespace {

using ::testing::HasSubstr;

// The loss of a token is the square of a weight that its id picks: gradients are known by hand.
struct Toy {
  at::Tensor weight = at::randn({256, 1}).set_requires_grad(true);
  AdamW optimizer{{weight}, {.weight_decay = 0}};
  std::string text = "The quick brown fox jumps over the lazy dog, twice.";
  TokenFile file = open(text);
  Sequences sequences{file, {.length = 4, .shuffle = false, .seed = 0}};

  Toy() = default;
  Toy(char end, std::string what)
      : text(std::move(what)), sequences(file, {.length = 4, .shuffle = false, .seed = 0, .end_token = end}) {}
  explicit Toy(char end) : sequences(file, {.length = 4, .shuffle = false, .seed = 0, .end_token = end}) {}

  static TokenFile open(const std::string& text) {
    std::string path = (std::filesystem::temp_directory_path() / "neap-trainer-XXXXXX").string();
    const int descriptor = ::mkstemp(path.data());
    EXPECT_EQ(::write(descriptor, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ::close(descriptor);
    TokenFile file = TokenFile::open(path);
    std::filesystem::remove(path);  // the mapping keeps it
    return file;
  }

  at::Tensor loss(const at::Tensor& inputs, double divisor) const {
    return at::embedding(weight, inputs).square().sum() / divisor;
  }

  Trainer trainer(const TrainSection& train, double clip = 0, Trainer::Loss custom = nullptr,
                  trace::Recorder* recorder = nullptr) {
    if (!custom) custom = [this](const at::Tensor& in, const at::Tensor&, double divisor) { return loss(in, divisor); };
    return Trainer({.loss = std::move(custom),
                    .sequences = sequences,
                    .optimizer = optimizer,
                    .rate = LearningRate({}, 10),
                    .device = device::Device::of(c10::kCPU),
                    .engine = nullptr,
                    .recorder = recorder},
                   train, clip);
  }
};

TrainSection section(int64_t batch, int64_t accumulation) {
  TrainSection train;
  train.batch = batch;
  train.sequence = 4;
  train.accumulation = accumulation;
  return train;
}

TEST(Trainer, TheLossIsTheMeanOverAllTokensHoweverTheyAreSplit) {
  at::manual_seed(1);
  Toy whole;
  at::manual_seed(1);
  Toy split;
  Trainer one = whole.trainer(section(6, 1));
  Trainer six = split.trainer(section(1, 6));
  const StepMetrics a = one.step();
  const StepMetrics b = six.step();
  EXPECT_EQ(a.tokens, 24);
  EXPECT_EQ(b.tokens, 24);
  EXPECT_NEAR(a.loss, b.loss, 1e-6);
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-6);

  at::manual_seed(1);
  const Toy fresh;
  double expected = 0;
  for (int i = 0; i < 24; ++i) {
    const auto value = fresh.weight[static_cast<int64_t>(fresh.text[static_cast<size_t>(i)])].item<double>();
    expected += value * value / 24;
  }
  EXPECT_NEAR(a.loss, expected, 1e-5);
}

TEST(Trainer, TheMeanIsOverTheLabelsThatCountHoweverTheyAreSplit) {
  for (const auto& [batch, accumulation] : {std::pair(6, 1), std::pair(1, 6)}) {
    Toy toy(' ');
    std::vector<double> divisors;
    int64_t counted = 0;
    const auto loss = [&](const at::Tensor& in, const at::Tensor& labels, double divisor) {
      counted += labels.ne(kIgnoredLabel).sum().item<int64_t>();
      divisors.push_back(divisor);
      return toy.loss(in, divisor);
    };
    EXPECT_EQ(toy.trainer(section(batch, accumulation), 0, loss).step().tokens, 24);
    EXPECT_EQ(counted, 24 - 4);  // "The quick brown fox jump"
    EXPECT_THAT(divisors, ::testing::Each(20));
    EXPECT_EQ(divisors.size(), static_cast<size_t>(accumulation));
  }
}

TEST(Trainer, StepsWithoutALabelThatCountsAreNamedAndChangeNothing) {
  Toy toy(' ', "             jumps over the lazy dog");
  const at::Tensor before = toy.weight.detach().clone();
  const auto loss = [&](const at::Tensor&, const at::Tensor& labels, double divisor) {
    return toy.loss(labels.masked_select(labels.ne(kIgnoredLabel)), divisor);
  };
  std::vector<std::string> seen;
  LogSink former = set_log_sink([&](LogLevel /*level*/, const std::string& text) { seen.push_back(text); });
  Trainer trainer = toy.trainer(section(1, 1), 0, loss);
  const StepMetrics first = trainer.step();
  trainer.step();
  set_log_sink(std::move(former));
  EXPECT_EQ(first.loss, 0);
  EXPECT_EQ(first.grad_norm, 0);
  EXPECT_TRUE(toy.weight.equal(before));
  EXPECT_THAT(seen, ::testing::ElementsAre(HasSubstr("step 1: none of its labels counts")));
}

TEST(Trainer, ASecondLossIsAddedUpBesideTheFirstAndDifferentiatedAsTheirSumSays) {
  at::manual_seed(1);
  Toy plain;
  at::manual_seed(1);
  Toy both;
  const StepMetrics alone = plain.trainer(section(1, 3)).step();
  const StepMetrics beside =
      both.trainer(section(1, 3), 0,
                   [&](const at::Tensor& in, const at::Tensor&, double divisor) -> Trainer::LossValue {
                     const at::Tensor loss = both.loss(in, divisor);
                     return {loss * 3, loss, loss * 2};
                   })
          .step();
  EXPECT_EQ(beside.loss, alone.loss);
  EXPECT_NEAR(beside.mtp_loss.value(), 2 * alone.loss, 1e-6);
  EXPECT_NEAR(beside.grad_norm, 3 * alone.grad_norm, 1e-5);
  EXPECT_EQ(alone.mtp_loss, std::nullopt);
}

TEST(Trainer, EachStepTakesTheNextSequencesAndTheSchedulesRate) {
  Toy toy;
  std::vector<int64_t> seen;
  Trainer trainer = toy.trainer(section(1, 2), 0, [&](const at::Tensor& in, const at::Tensor& labels, double divisor) {
    seen.push_back(in[0][0].item<int64_t>());
    EXPECT_EQ(labels[0][0].item<int64_t>(), in[0][1].item<int64_t>());
    return toy.loss(in, divisor);
  });
  const StepMetrics first = trainer.step();
  const StepMetrics second = trainer.step();
  EXPECT_THAT(seen, ::testing::ElementsAre('T', 'q', 'k', 'o'));  // every fourth character
  EXPECT_EQ(first.step, 1);
  EXPECT_EQ(second.step, 2);
  EXPECT_EQ(first.lr, LearningRate({}, 10).at(0));
  EXPECT_EQ(second.lr, LearningRate({}, 10).at(1));
}

TEST(Trainer, ReportsTheNormBeforeClippingAndDropsGradientsAfterTheStep) {
  at::manual_seed(1);
  Toy free;
  at::manual_seed(1);
  Toy clipped;
  const double norm = free.trainer(section(2, 1)).step().grad_norm;
  EXPECT_EQ(clipped.trainer(section(2, 1), norm / 3).step().grad_norm, norm);
  EXPECT_FALSE(free.weight.grad().defined());
  // AdamW's first update hardly depends on the gradient's scale; its state does.
  const double free_square = free.optimizer.states()[0].exp_avg.norm().item<double>();
  EXPECT_NEAR(clipped.optimizer.states()[0].exp_avg.norm().item<double>(), free_square / 3, 1e-6);
}

TEST(Trainer, ANonFiniteStepStopsWithParametersUntouched) {
  Toy toy;
  const at::Tensor before = toy.weight.detach().clone();
  Trainer trainer = toy.trainer(section(1, 1), 1, [&](const at::Tensor& in, const at::Tensor&, double) {
    return toy.loss(in, 1) * std::numeric_limits<float>::quiet_NaN();
  });
  try {
    trainer.step();
    FAIL() << "no error";
  } catch (const NonFiniteError& error) {
    EXPECT_THAT(error.what(), HasSubstr("step 1: the loss is nan"));
    EXPECT_THAT(error.what(), HasSubstr("train.non_finite: skip"));
  }
  EXPECT_TRUE(at::equal(toy.weight.detach(), before));
  EXPECT_FALSE(toy.weight.grad().defined());
}

TEST(Trainer, ANonFiniteStepIsPassedOverOnRequest) {
  Toy toy;
  const at::Tensor before = toy.weight.detach().clone();
  bool poison = true;
  TrainSection train = section(1, 1);
  train.non_finite = NonFinite::kSkip;
  Trainer trainer = toy.trainer(train, 1, [&](const at::Tensor& in, const at::Tensor&, double divisor) {
    return toy.loss(in, divisor) * (poison ? std::numeric_limits<float>::infinity() : 1.0F);
  });
  EXPECT_TRUE(trainer.step().skipped);
  EXPECT_TRUE(at::equal(toy.weight.detach(), before));
  poison = false;
  const StepMetrics good = trainer.step();
  EXPECT_FALSE(good.skipped);
  EXPECT_EQ(good.step, 2);
  EXPECT_FALSE(at::equal(toy.weight.detach(), before));
}

TEST(Trainer, OutOfMemoryNamesThePhaseAndTheHolders) {
  Toy toy;
  Trainer trainer = toy.trainer(section(1, 1), 1, [&](const at::Tensor&, const at::Tensor&, double) -> at::Tensor {
    C10_THROW_ERROR(OutOfMemoryError, "asked for 5 MiB\nsecond line");
  });
  try {
    trainer.step();
    FAIL() << "no error";
  } catch (const DeviceOutOfMemory& error) {
    EXPECT_EQ(error.shortage().when, "the forward of step 1");
    EXPECT_EQ(error.shortage().reason, "asked for 5 MiB");
    EXPECT_EQ(error.shortage().use.parameters, Bytes(256 * 4));
    EXPECT_EQ(error.shortage().use.optimizer, Bytes((2 * 256 + 1) * 4));
  }
}

TEST(Trainer, OtherErrorsPassThroughAndLeaveNoGradients) {
  Toy toy;
  Trainer trainer =
      toy.trainer(section(1, 2), 1, [&, calls = 0](const at::Tensor& in, const at::Tensor&, double) mutable {
        if (++calls == 2) throw std::runtime_error("broken");
        return toy.loss(in, 1);
      });
  EXPECT_THROW(trainer.step(), std::runtime_error);
  EXPECT_FALSE(toy.weight.grad().defined());
}

TEST(Trainer, RecordsItsPhases) {
  Toy toy;
  trace::Recorder recorder;
  toy.trainer(section(1, 2), 1, nullptr, &recorder).step();
  const trace::Snapshot snapshot = recorder.snapshot();
  EXPECT_EQ(snapshot.find("trainer/host", "forward").size(), 2);
  EXPECT_EQ(snapshot.find("trainer/host", "backward").size(), 2);
  EXPECT_EQ(snapshot.find("trainer/host", "update").size(), 1);
}

TEST(OutOfMemoryText, KnowsEveryAllocator) {
  EXPECT_EQ(out_of_memory_text(std::runtime_error("x")), std::nullopt);
  EXPECT_EQ(out_of_memory_text(OutOfMemory("pool is full")), "pool is full");
  EXPECT_TRUE(out_of_memory_text(std::bad_alloc()).has_value());
  try {
    at::empty({int64_t{1} << 55}, at::kByte);
    FAIL() << "a petabyte was allocated";
  } catch (const std::exception& error) {
    EXPECT_TRUE(out_of_memory_text(error).has_value()) << error.what();
  }
}

TEST(Trainer, AnOperatorWithoutADeterministicImplementationIsTheUsersMatter) {
  Toy toy;
  Trainer trainer = toy.trainer(section(1, 1), 0, [](const at::Tensor&, const at::Tensor&, double) {
    return at::zeros({1}).put_(at::zeros({1}, at::kLong), at::ones({1}));
  });
  set_deterministic(Deterministic::kOn);
  const ScopeExit off([] { at::globalContext().setDeterministicAlgorithms(false, false); });
  EXPECT_THAT(testing::error_of([&] { trainer.step(); }), HasSubstr("[train.deterministic] expected operators with a"));
}

}  // namespace
}  // namespace neap::train
