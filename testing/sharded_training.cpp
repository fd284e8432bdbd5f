#include "testing/sharded_training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "testing/matchers.h"
#include "testing/small_models.h"

namespace neap::testing {
namespace {

int64_t micro_batch_number(const Recipe& recipe, int64_t step, int rank, int64_t k) {
  return (step * recipe.ranks + rank) * recipe.micro_batches + k;
}

// Gradients that add up as torch adds them, the first one taken as it is; but narrow floats add up in float32 and are
// rounded once, as collectives do it.
class Sum {
 public:
  void add(const std::vector<at::Tensor>& terms) {
    sums_.resize(terms.size());
    dtypes_.resize(terms.size());
    for (std::size_t i = 0; i < terms.size(); ++i) {
      if (!terms[i].defined()) continue;
      dtypes_[i] = terms[i].scalar_type();
      const at::Tensor term = terms[i].to(dtypes_[i] == at::kDouble ? at::kDouble : at::kFloat);
      sums_[i] = sums_[i].defined() ? sums_[i] + term : term;
    }
  }
  std::vector<at::Tensor> value() const {
    std::vector<at::Tensor> rounded;
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      rounded.push_back(sums_[i].defined() ? sums_[i].to(dtypes_[i]) : at::Tensor());
    }
    return rounded;
  }

 private:
  std::vector<at::Tensor> sums_;
  std::vector<at::ScalarType> dtypes_;
};

// A tied parameter once.
std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& p : parameters) {
    if (std::ranges::none_of(out, [&](const at::Tensor& seen) { return seen.is_same(p); })) out.push_back(p);
  }
  return out;
}

class Alone {
 public:
  explicit Alone(const Recipe& recipe)
      : recipe_(recipe), model_(recipe.model(0)), parameters_(distinct(model_.module->parameters())) {}

  Trained train() {
    const auto optimizer = recipe_.optimizer(parameters_);
    for (int64_t step = 0; step < recipe_.steps; ++step) {
      const at::NoGradGuard no_grad;
      const std::vector<at::Tensor> gradients = total(step);
      for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = gradients[i];
      optimizer->step();
      optimizer->zero_grad();
    }
    for (const auto& item : model_.module->named_parameters())
      out_.parameters[item.key()] = item.value().detach().cpu();
    return std::move(out_);
  }

 private:
  std::vector<at::Tensor> gradients(int64_t step, int rank, int64_t k) {
    const at::AutoGradMode grad_mode(true);
    const at::Tensor loss = model_.loss(micro_batch_number(recipe_, step, rank, k));
    loss.backward();
    out_.losses.push_back(loss.detach().cpu());
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : parameters_) gradients.push_back(std::exchange(p.mutable_grad(), at::Tensor()));
    return gradients;
  }

  std::vector<at::Tensor> mean_over_ranks(const std::function<std::vector<at::Tensor>(int rank)>& of_rank) {
    const int shard = recipe_.ranks / std::max(1, recipe_.mesh.data_parallel_replicate);
    Sum over_replicas;
    for (int first = 0; first < recipe_.ranks; first += shard) {
      Sum over_shards;
      for (int rank = first; rank < first + shard; ++rank) over_shards.add(of_rank(rank));
      over_replicas.add(over_shards.value());
    }
    std::vector<at::Tensor> mean = over_replicas.value();
    for (at::Tensor& gradient : mean) {
      if (gradient.defined() && recipe_.ranks > 1) gradient = gradient / recipe_.ranks;
    }
    return mean;
  }

  std::vector<at::Tensor> total(int64_t step) {
    if (recipe_.no_sync) {
      return mean_over_ranks([&](int rank) {
        Sum sum;
        for (int64_t k = 0; k < recipe_.micro_batches; ++k) sum.add(gradients(step, rank, k));
        return sum.value();
      });
    }
    Sum sum;
    for (int64_t k = 0; k < recipe_.micro_batches; ++k) {
      sum.add(mean_over_ranks([&](int rank) { return gradients(step, rank, k); }));
    }
    return sum.value();
  }

  const Recipe& recipe_;
  TestModel model_;
  std::vector<at::Tensor> parameters_;
  Trained out_;
};

// One rank's run. losses[step × micro_batches + k].
void train_rank(const Recipe& recipe, comm::World& world, TestModel model, std::vector<at::Tensor>& losses,
                std::map<std::string, at::Tensor>& state) {
  const comm::Mesh mesh(world.size(), world.rank(), recipe.mesh);
  shard::Sharded sharded = shard::fully_shard(*model.module, world.groups(mesh), recipe.options);
  const auto optimizer = recipe.optimizer(sharded.parameters());
  for (int64_t step = 0; step < recipe.steps; ++step) {
    for (int64_t k = 0; k < recipe.micro_batches; ++k) {
      std::optional<shard::Sharded::NoSync> no_sync;
      if (recipe.no_sync && k + 1 < recipe.micro_batches) no_sync.emplace(sharded);
      const at::Tensor loss =
          sharded.run([&] { return model.loss(micro_batch_number(recipe, step, world.rank(), k)); });
      loss.backward();
      losses.push_back(loss.detach().cpu());
    }
    if (recipe.after_backward) recipe.after_backward(sharded, world.rank());
    optimizer->step();
    optimizer->zero_grad();
  }
  state = sharded.full_state();
  if (recipe.at_end) recipe.at_end(sharded, model, world.rank());
}

}  // namespace

Trained train_alone(const Recipe& recipe) { return Alone(recipe).train(); }

Trained train_sharded(const Recipe& recipe) {
  const auto ranks = static_cast<std::size_t>(recipe.ranks);
  std::vector<TestModel> models;
  for (int rank = 0; rank < recipe.ranks; ++rank) models.push_back(recipe.model(rank));
  std::vector<std::vector<at::Tensor>> losses(ranks);
  std::vector<std::map<std::string, at::Tensor>> states(ranks);
  run_ranks(recipe.ranks, [&](comm::World& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    train_rank(recipe, world, std::move(models[rank]), losses[rank], states[rank]);
  });
  Trained out{.losses = {}, .parameters = std::move(states[0])};
  for (int64_t step = 0; step < recipe.steps; ++step) {
    const auto at = [&](std::size_t rank, int64_t k) {
      return losses[rank][static_cast<std::size_t>(step * recipe.micro_batches + k)];
    };
    // As train_alone() runs them.
    if (recipe.no_sync) {
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        for (int64_t k = 0; k < recipe.micro_batches; ++k) out.losses.push_back(at(rank, k));
      }
    } else {
      for (int64_t k = 0; k < recipe.micro_batches; ++k) {
        for (std::size_t rank = 0; rank < ranks; ++rank) out.losses.push_back(at(rank, k));
      }
    }
  }
  return out;
}

std::unique_ptr<torch::optim::Optimizer> make_sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}

std::unique_ptr<torch::optim::Optimizer> make_adamw(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(3e-3).weight_decay(0.1));
}

::testing::AssertionResult bit_equal(const Trained& a, const Trained& b) {
  if (const auto equal = bit_equal(a.losses, b.losses); !equal)
    return ::testing::AssertionFailure() << "losses: " << equal.message();
  if (a.parameters.size() != b.parameters.size()) return ::testing::AssertionFailure() << "other parameters";
  for (const auto& [name, value] : a.parameters) {
    const auto other = b.parameters.find(name);
    if (other == b.parameters.end()) return ::testing::AssertionFailure() << "no " << name;
    if (const auto equal = bit_equal(value, other->second); !equal)
      return ::testing::AssertionFailure() << name << ": " << equal.message();
  }
  return ::testing::AssertionSuccess();
}

TestModel rotary_decoder(c10::Device device) {
  RotaryDecoder::Shape shape;
  shape.layers = 4;
  const auto model = std::make_shared<RotaryDecoder>(shape, device);
  return {model, [model](int64_t micro_batch) { return model->loss(micro_batch); }};
}

TestUnit::TestUnit(const std::vector<at::Tensor>& parameters, Body body) : body_(std::move(body)) {
  for (const at::Tensor& p : parameters) {
    parameters_.push_back(register_parameter("p" + std::to_string(parameters_.size()), p, p.requires_grad()));
  }
}

at::Tensor TestUnit::forward(const at::Tensor& x) {
  return hook_point().run({x}, [&] { return body(x); });
}

TestNet::TestNet(std::vector<std::shared_ptr<TestUnit>> units) : units_(std::move(units)) {
  const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
  for (std::size_t i = 0; i < units_.size(); ++i) list->register_module(std::to_string(i), units_[i]);
}

at::Tensor TestNet::input(int64_t micro_batch) {
  return at::randn({4, kWidth}, at::detail::createCPUGenerator(static_cast<uint64_t>(5000 + micro_batch)));
}

at::Tensor TestNet::loss(int64_t micro_batch) {
  at::Tensor x = input(micro_batch);
  for (const auto& unit : units_) x = unit->forward(x);
  return x.pow(2).mean();
}

TestModel test_model(const std::shared_ptr<TestNet>& net) {
  return {net, [net](int64_t micro_batch) { return net->loss(micro_batch); }};
}

at::Tensor parameter(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype) {
  return (at::randn(sizes, at::detail::createCPUGenerator(seed)) * 0.5).to(dtype).set_requires_grad(true);
}

std::shared_ptr<TestUnit> dense_unit(uint64_t seed) {
  constexpr int64_t kWidth = TestNet::kWidth;
  return std::make_shared<TestUnit>(std::vector<at::Tensor>{parameter({kWidth, kWidth}, seed)},
                                    [](const auto& p, const at::Tensor& x) { return at::linear(x, p[0]).tanh(); });
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

}  // namespace neap::testing
