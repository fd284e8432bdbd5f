#include "testing/small_models.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <string>

#include "testing/matchers.h"

namespace neap::testing {
namespace {

at::Tensor parameter(at::IntArrayRef sizes, double scale, at::TensorOptions options) {
  return (at::randn(sizes) * scale).to(options);
}

at::Tensor rms(const at::Tensor& x, const at::Tensor& weight) {
  return x * at::rsqrt(x.pow(2).mean(-1, true) + 1e-5) * weight;
}

at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables) {
  const int64_t half = x.size(-1) / 2;
  const auto turned = at::cat({x.narrow(-1, half, half).neg(), x.narrow(-1, 0, half)}, -1);
  return x * tables.cos + turned * tables.sin;
}

at::Tensor tokens(int64_t step, int64_t vocabulary, at::IntArrayRef sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return (at::arange(count, at::kLong) * 7 + step * 13).remainder(vocabulary).view(sizes);
}

}  // namespace

RotaryLayer::RotaryLayer(int64_t dim, int64_t heads, c10::Device device)
    : heads_(heads),
      norm_(register_parameter("norm", parameter({dim}, 0.1, device) + 1)),
      qkv_(register_parameter("qkv", parameter({3 * dim, dim}, 0.1, device))),
      out_(register_parameter("out", parameter({dim, dim}, 0.1, device))),
      up_(register_parameter("up", parameter({4 * dim, dim}, 0.1, device))),
      down_(register_parameter("down", parameter({dim, 4 * dim}, 0.1, device))) {}

at::Tensor RotaryLayer::forward(const at::Tensor& x, const RotaryTables& tables, Handing handing) {
  if (handing == Handing::kKeyword) return hook_point().run(*this, {x}, &RotaryLayer::body, tables);
  return hook_point().run(*this, {x, tables.cos, tables.sin},
                          [](RotaryLayer& layer, const at::Tensor& in, const at::Tensor& cos, const at::Tensor& sin) {
                            return layer.body(in, {cos, sin});
                          });
}

at::Tensor RotaryLayer::body(const at::Tensor& x, const RotaryTables& tables) const {
  const int64_t batch = x.size(0), sequence = x.size(1), head = x.size(2) / heads_;
  // Three views of one storage.
  const auto qkv = at::linear(rms(x, norm_), qkv_).chunk(3, -1);
  const auto split = [&](const at::Tensor& t) { return t.view({batch, sequence, heads_, head}).transpose(1, 2); };
  const auto q = rotate(split(qkv[0]), tables), k = rotate(split(qkv[1]), tables), v = split(qkv[2]);
  const auto attended = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
  const auto h = x + at::linear(attended.transpose(1, 2).reshape({batch, sequence, heads_ * head}), out_);
  return h + at::linear(at::silu(at::linear(h, up_)), down_);
}

RotaryDecoder::RotaryDecoder(Shape shape, c10::Device device, Handing handing) : shape_(shape), handing_(handing) {
  at::manual_seed(664);
  embedding_ = register_parameter("embedding", parameter({shape.vocabulary, shape.dim}, 0.5, device));
  head_ = register_parameter("head", parameter({shape.vocabulary, shape.dim}, 0.5, device));
  const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < shape.layers; ++i)
    layers_.push_back(
        list->register_module(std::to_string(i), std::make_shared<RotaryLayer>(shape.dim, shape.heads, device)));
}

RotaryTables RotaryDecoder::fresh_tables() const {
  const int64_t head = shape_.dim / shape_.heads;
  const auto exponents = at::arange(0, head, 2, at::kFloat) / static_cast<double>(-head);
  const auto angles = at::outer(at::arange(shape_.sequence, at::kFloat), at::pow(10000.0, exponents));
  const auto both = at::cat({angles, angles}, -1).to(embedding_.device());
  return {both.cos(), both.sin()};
}

at::Tensor RotaryDecoder::loss(int64_t step) {
  tables_ = fresh_tables();
  const auto ids = tokens(step, shape_.vocabulary, {shape_.batch, shape_.sequence}).to(embedding_.device());
  auto h = at::embedding(embedding_, ids);
  for (const auto& layer : layers_) h = layer->forward(h, tables_, handing_);
  const auto logits = at::linear(h, head_).view({-1, shape_.vocabulary});
  return at::cross_entropy_loss(logits, ids.roll(-1, 1).reshape({-1}));
}

HostileUnit::HostileUnit(int64_t channels, at::TensorOptions options)
    : conv_(register_parameter("conv", parameter({channels, channels, 3, 3}, 0.1, options))),
      project_(register_parameter("project", parameter({3 * channels, channels}, 0.2, options))),
      scale_(register_parameter("scale", parameter({}, 1.0, options))) {}

at::Tensor HostileUnit::forward(const at::Tensor& x, const at::Tensor& index) {
  return hook_point().run(*this, {x, index}, &HostileUnit::body);
}

at::Tensor HostileUnit::body(const at::Tensor& x, const at::Tensor& index) const {
  // Channels-last convolution; its input is also used below.
  const auto image = x.contiguous(at::MemoryFormat::ChannelsLast);
  auto y = at::conv2d(image, conv_, {}, 1, 1);
  y = y * scale_ * y.mean();  // one tensor saved twice, and 0-dim ones
  y.relu_();                  // in place: the result is what is saved
  // Rows in another memory order, three views of one projection, a slice of each.
  const auto rows = y.permute({0, 2, 3, 1});
  const auto qkv = at::linear(rows, project_).chunk(3, -1);
  const auto stepped = qkv[0].slice(1, 0, c10::nullopt, 2) * qkv[1].slice(1, 0, c10::nullopt, 2);
  // An expansion of stride 0, a transposed matrix product, integers, an empty tensor.
  const auto wide = stepped.mean(1, true).expand(stepped.sizes()) * stepped;
  const auto flat = wide.reshape({wide.size(0), -1, wide.size(-1)});
  const auto mixed = at::matmul(flat.transpose(1, 2), flat).softmax(-1);
  const auto picked = qkv[2].index_select(1, index);
  const auto nothing = qkv[2].narrow(1, 0, 0).exp();
  const auto extra = picked.tanh().mean() + at::matmul(flat, mixed).mean() + nothing.sum();
  return x + y * 0.1 + extra;
}

HostileModel::HostileModel(int64_t units, at::TensorOptions options) : options_(options) {
  at::manual_seed(31);
  const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < units; ++i)
    units_.push_back(list->register_module(std::to_string(i), std::make_shared<HostileUnit>(8, options)));
}

at::Tensor HostileModel::loss(int64_t step) {
  auto x = ((tokens(step, 97, {2, 8, 6, 6}).to(at::kFloat) - 48) / 48).to(options_);
  const auto index = at::tensor({4, 0, 4, 2}, at::kLong).to(options_.device());
  for (const auto& unit : units_) x = unit->forward(x, index);
  return x.to(at::kFloat).pow(2).mean();
}

class FunctionUnits::Unit : public torch::nn::Module, public autograd::Hookable {
 public:
  explicit Unit(Body body) : body_(std::move(body)) {}
  at::Tensor forward(const at::Tensor& x) {
    return hook_point().run(*this, {x}, [](Unit& unit, const at::Tensor& in) { return unit.body_(in); });
  }

 private:
  Body body_;
};

FunctionUnits::FunctionUnits(std::vector<Body> bodies, const std::vector<at::Tensor>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) register_parameter("parameter" + std::to_string(i), parameters[i]);
  const auto list = register_module("layers", std::make_shared<torch::nn::Module>());
  for (size_t i = 0; i < bodies.size(); ++i)
    units_.push_back(list->register_module(std::to_string(i), std::make_shared<Unit>(std::move(bodies[i]))));
}

at::Tensor FunctionUnits::run(size_t unit, const at::Tensor& x) { return units_.at(unit)->forward(x); }

at::Tensor FunctionUnits::forward(at::Tensor x) {
  for (const auto& unit : units_) x = unit->forward(x);
  return x;
}

TrainingRecord train(torch::nn::Module& model, const std::function<at::Tensor(int64_t step)>& loss, int64_t steps,
                     const std::function<void(int64_t step)>& after_step) {
  TrainingRecord record;
  const auto parameters = model.parameters();
  std::vector<at::Tensor> momentum(parameters.size());
  for (int64_t step = 0; step < steps; ++step) {
    {
      const auto value = loss(step);
      value.backward();
      record.losses.push_back(value.detach().cpu());
    }
    auto& gradients = record.gradients.emplace_back();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto parameter = parameters[i];
      const auto gradient = parameter.grad();
      gradients.push_back(gradient.defined() ? gradient.cpu() : at::Tensor());
      if (!gradient.defined()) continue;
      momentum[i] = momentum[i].defined() ? momentum[i] * 0.9 + gradient : gradient.clone();
      parameter.add_(momentum[i], -0.01);
      parameter.mutable_grad().reset();
    }
    if (after_step) after_step(step);
  }
  for (const auto& parameter : parameters) record.parameters.push_back(parameter.detach().cpu());
  return record;
}

::testing::AssertionResult bit_equal(const TrainingRecord& a, const TrainingRecord& b) {
  if (a.gradients.size() != b.gradients.size()) return ::testing::AssertionFailure() << "different numbers of steps";
  if (auto result = bit_equal(a.losses, b.losses); !result) return result << "\n(losses by step)";
  for (size_t step = 0; step < a.gradients.size(); ++step)
    if (auto result = bit_equal(a.gradients[step], b.gradients[step]); !result)
      return result << "\n(gradients of step " << step << ")";
  if (auto result = bit_equal(a.parameters, b.parameters); !result) return result << "\n(parameters)";
  return ::testing::AssertionSuccess();
}

}  // namespace neap::testing
