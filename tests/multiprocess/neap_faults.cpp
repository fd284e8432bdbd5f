// One rank of a sharded training run in which rank 1 goes wrong: neap_faults FAULT cpu|sim [TIMEOUT_MS]
//
// Five units, of which a step runs the first four, one after the other. Rank 1's fault comes in the third step, when
// the order of the units is known and gathers are begun ahead:
//
//   none                               all ends well
//   kill_forward, kill_backward        rank 1 is killed inside layers.1
//   throw_forward, throw_backward      a hook of its own at layers.1 throws
//   other_order, skipped_unit, extra_unit, skipped_backward
//                                      rank 1 takes another branch
//   out_of_memory                      its device has too little memory left for backward (sim)
//   early                              rank 1 throws before the first collective of all
//
// Exit status 0 and a checksum of the trained parameters, or 1 with the error on standard error.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/comm/world.h"
#include "neap/shard/fully_shard.h"
#include "testing/sim_fixture.h"

namespace {

using namespace neap;

constexpr int64_t kWidth = 64, kRows = 256;
constexpr int kSteps = 5, kFaultyStep = 2;

at::Tensor values(at::IntArrayRef sizes, uint64_t seed, c10::Device device) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed)).to(device);
}

class Layer : public torch::nn::Module, public autograd::Hookable {
 public:
  Layer(uint64_t seed, c10::Device device)
      : weight_(register_parameter("weight", values({kWidth, kWidth}, seed, device) * 0.1)) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run({x}, [&] { return at::linear(x, weight_).tanh(); });
  }

 private:
  at::Tensor weight_;
};

class Net : public torch::nn::Module {
 public:
  explicit Net(c10::Device device) {
    const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
    for (uint64_t i = 0; i < 5; ++i) {
      layers_.push_back(list->register_module(std::to_string(i), std::make_shared<Layer>(i, device)));
    }
  }
  at::Tensor loss(at::Tensor x, const std::vector<std::size_t>& order) {
    for (const std::size_t i : order) x = layers_[i]->forward(x);
    return x.pow(2).mean();
  }
  autograd::HookPoint& point(std::size_t i) { return layers_[i]->hook_point(); }

 private:
  std::vector<std::shared_ptr<Layer>> layers_;
};

// What rank 1 does at layers.1 once it is armed.
class Trap final : public autograd::UnitHook {
 public:
  explicit Trap(std::string fault) : fault_(std::move(fault)) {}

  void around_forward(const autograd::UnitCall& /*call*/, c10::function_ref<void()> body) override {
    spring("_forward");
    body();
  }
  void before_backward(const autograd::UnitCall& /*call*/) override { spring("_backward"); }

  bool armed = false;

 private:
  void spring(const char* when) const {
    if (!armed) return;
    if (fault_ == std::string("kill") + when) std::raise(SIGKILL);
    if (fault_ == std::string("throw") + when) throw std::runtime_error("a hook at layers.1 is out of luck");
  }

  const std::string fault_;
};

std::vector<std::size_t> order_of(std::string_view fault) {
  if (fault == "other_order") return {0, 2, 1, 3};
  if (fault == "skipped_unit") return {0, 1, 3};
  if (fault == "extra_unit") return {0, 1, 4, 2, 3};
  return {0, 1, 2, 3};
}

// Takes so much of the device's memory that forward still fits and backward does not, from the peaks of a step before.
class Ballast {
 public:
  void begin_step() {
    rest_ = memory().current;
    neap::testing::sim_control().reset_peak(0);
  }
  void forward_is_over() { forward_ = memory().peak - rest_; }
  void end_step() { step_ = memory().peak - rest_; }
  at::Tensor take() const {
    if (step_ <= forward_) throw std::logic_error("the peak of a step was expected in backward");
    const int64_t left = (forward_ + step_) / 2;
    return at::empty({memory().capacity - memory().current - left}, neap::testing::on_sim().dtype(at::kByte));
  }

 private:
  static sim::MemoryStats memory() { return neap::testing::sim_control().memory(0); }
  int64_t rest_ = 0, forward_ = 0, step_ = 0;
};

void train(comm::World& world, c10::Device device, const std::string& fault) {
  const bool culprit = world.rank() == 1;
  Net net(device);
  shard::Sharded sharded = shard::fully_shard(net, world.groups(comm::Mesh(world.size(), world.rank())));
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.05));
  const auto trap = std::make_shared<Trap>(fault);
  const auto handle = net.point(1).attach(trap, autograd::HookOrder::kOffload);
  std::optional<Ballast> meter;
  if (fault == "out_of_memory") meter.emplace();
  at::Tensor ballast;
  if (culprit && fault == "early") throw std::runtime_error("rank 1 never came to its first collective");
  for (int step = 0; step < kSteps; ++step) {
    const bool faulty = culprit && step == kFaultyStep;
    trap->armed = faulty;
    if (meter && faulty) ballast = meter->take();
    if (meter) meter->begin_step();
    const at::Tensor x =
        values({kRows, kWidth}, static_cast<uint64_t>(100 + step * world.size() + world.rank()), device);
    const at::Tensor loss = sharded.run([&] { return net.loss(x, order_of(faulty ? fault : "none")); });
    if (meter) meter->forward_is_over();
    if (!faulty || fault != "skipped_backward") loss.backward();
    if (meter) meter->end_step();
    world.check();
    optimizer.step();
    optimizer.zero_grad();
  }
  double sum = 0;
  for (const auto& [name, value] : sharded.full_state()) sum += value.abs().sum().item<double>();
  std::cout << "rank " << world.rank() << ": " << std::hexfloat << sum << std::endl;
}

// torch's own errors go on with a backtrace.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

int run(const std::string& fault, const std::string& device, const comm::WorldOptions& options) {
  at::set_num_threads(1);
  if (device == "sim") {
    sim::DeviceConfig config = neap::testing::default_config();
    config.capacity = Bytes(4 << 20);
    neap::testing::sim_control().configure(config);
  }
  const auto world = comm::World::connect(comm::Launch::from_environment(), options);
  try {
    train(*world, device == "sim" ? neap::testing::sim() : c10::Device(c10::kCPU), fault);
    world->close();
  } catch (const std::exception& error) {
    world->abandon(first_line(error));
    throw;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: neap_faults FAULT cpu|sim [TIMEOUT_MS]\n";
    return 2;
  }
  try {
    comm::WorldOptions options;
    if (argc > 3) options.timeout = std::chrono::milliseconds(std::stoll(argv[3]));
    return run(argv[1], argv[2], options);
  } catch (const std::exception& error) {
    std::cerr << first_line(error) << std::endl;
    return 1;
  }
}
