// Operator by operator: results and gradients on sim are the CPU's to the last bit, and the same for views, in-place
// operators, lists and growing outputs.
#include <ATen/Context.h>
#include <ATen/Functions.h>  // all of them: that is what is tested
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>

#include <functional>
#include <string>
#include <vector>

#include "testing/matchers.h"
#include "testing/sim_fixture.h"

namespace neap::testing {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct OperatorCase {
  std::string name;
  std::function<Tensors()> make_inputs;  // on the CPU
  std::function<Tensors(const Tensors&)> run;

  friend void PrintTo(const OperatorCase& op, std::ostream* out) { *out << op.name; }
};

Tensor real(at::IntArrayRef size) { return at::randn(size); }
Tensor positive(at::IntArrayRef size) { return at::rand(size) + 0.1; }
Tensor ints(at::IntArrayRef size, int64_t end = 8) { return at::randint(0, end, size, at::kLong); }

template <class Function>
OperatorCase unary(std::string name, Function function, bool only_positive = false) {
  return {std::move(name),
          [=] {
            return Tensors{only_positive ? positive({3, 5, 4}) : real({3, 5, 4})};
          },
          [=](const Tensors& in) { return Tensors{function(in[0])}; }};
}

template <class Function>
OperatorCase binary(std::string name, Function function) {
  return {std::move(name),
          [] {
            return Tensors{positive({4, 1, 6}), positive({5, 6})};
          },
          [=](const Tensors& in) { return Tensors{function(in[0], in[1])}; }};
}

template <class Function>
OperatorCase general(std::string name, std::function<Tensors()> inputs, Function function) {
  return {std::move(name), std::move(inputs), [=](const Tensors& in) { return Tensors{function(in)}; }};
}

void add_pointwise(std::vector<OperatorCase>& cases) {
  cases.insert(
      cases.end(),
      {
          unary("neg", [](const Tensor& x) { return -x; }),
          unary("abs", [](const Tensor& x) { return x.abs(); }),
          unary("exp", [](const Tensor& x) { return x.exp(); }),
          unary("expm1", [](const Tensor& x) { return x.expm1(); }),
          unary(
              "log", [](const Tensor& x) { return x.log(); }, true),
          unary(
              "log1p", [](const Tensor& x) { return x.log1p(); }, true),
          unary(
              "sqrt", [](const Tensor& x) { return x.sqrt(); }, true),
          unary(
              "rsqrt", [](const Tensor& x) { return x.rsqrt(); }, true),
          unary(
              "reciprocal", [](const Tensor& x) { return x.reciprocal(); }, true),
          unary("sin", [](const Tensor& x) { return x.sin(); }),
          unary("cos", [](const Tensor& x) { return x.cos(); }),
          unary("tanh", [](const Tensor& x) { return x.tanh(); }),
          unary("sigmoid", [](const Tensor& x) { return x.sigmoid(); }),
          unary("log_sigmoid", [](const Tensor& x) { return at::log_sigmoid(x); }),
          unary("erf", [](const Tensor& x) { return x.erf(); }),
          unary("relu", [](const Tensor& x) { return x.relu(); }),
          unary("leaky_relu", [](const Tensor& x) { return at::leaky_relu(x, 0.1); }),
          unary("elu", [](const Tensor& x) { return at::elu(x); }),
          unary("gelu", [](const Tensor& x) { return at::gelu(x); }),
          unary("gelu_tanh", [](const Tensor& x) { return at::gelu(x, "tanh"); }),
          unary("silu", [](const Tensor& x) { return at::silu(x); }),
          unary("mish", [](const Tensor& x) { return at::mish(x); }),
          unary("softplus", [](const Tensor& x) { return at::softplus(x); }),
          unary("hardswish", [](const Tensor& x) { return at::hardswish(x); }),
          unary("glu", [](const Tensor& x) { return at::glu(x, -1); }),
          unary("clamp", [](const Tensor& x) { return x.clamp(-0.5, 0.7); }),
          unary("pow_scalar", [](const Tensor& x) { return x.pow(3); }),
          unary("square_and_round", [](const Tensor& x) { return x.square().round(); }),
          unary("scalar_arithmetic", [](const Tensor& x) { return (2.5 - x * 3) / 1.7; }),
          unary("to_double_and_back", [](const Tensor& x) { return x.to(at::kDouble).mul(1.1).to(at::kFloat); }),
          unary("to_bf16_and_back", [](const Tensor& x) { return x.to(at::kBFloat16).mul(2).to(at::kFloat); }),
          unary("isnan_isinf", [](const Tensor& x) { return at::logical_or(x.isnan(), (x / 0.0).isinf()); }),
          binary("add", [](const Tensor& a, const Tensor& b) { return at::add(a, b, 0.3); }),
          binary("sub", [](const Tensor& a, const Tensor& b) { return a - b; }),
          binary("mul", [](const Tensor& a, const Tensor& b) { return a * b; }),
          binary("div", [](const Tensor& a, const Tensor& b) { return a / b; }),
          binary("pow", [](const Tensor& a, const Tensor& b) { return a.pow(b); }),
          binary("maximum", [](const Tensor& a, const Tensor& b) { return at::maximum(a, b); }),
          binary("atan2", [](const Tensor& a, const Tensor& b) { return at::atan2(a, b); }),
          binary("lerp", [](const Tensor& a, const Tensor& b) { return at::lerp(a, b, 0.3); }),
          binary("fmod", [](const Tensor& a, const Tensor& b) { return at::fmod(a, b); }),
          binary("where", [](const Tensor& a, const Tensor& b) { return at::where(a > b, a, b); }),
          binary("comparisons", [](const Tensor& a, const Tensor& b) { return (a < b) ^ (a >= b * 0.5); }),
          binary("addcmul", [](const Tensor& a, const Tensor& b) { return at::addcmul(a, b, b, 0.5); }),
          binary("addcdiv", [](const Tensor& a, const Tensor& b) { return at::addcdiv(a, b, b + 1, 0.5); }),
      });
}

void add_reductions(std::vector<OperatorCase>& cases) {
  cases.insert(cases.end(),
               {
                   unary("sum", [](const Tensor& x) { return x.sum(); }),
                   unary("sum_dim",
                         [](const Tensor& x) {
                           return x.sum({0, 2}, true);
                         }),
                   unary("mean", [](const Tensor& x) { return x.mean(-1); }),
                   unary("var", [](const Tensor& x) { return x.var(-1); }),
                   unary("std", [](const Tensor& x) { return x.std(0); }),
                   unary("prod", [](const Tensor& x) { return x.prod(1); }),
                   unary("amax", [](const Tensor& x) { return x.amax(1); }),
                   unary("max_dim", [](const Tensor& x) { return std::get<0>(x.max(1)); }),
                   unary("min", [](const Tensor& x) { return x.min(); }),
                   unary("median", [](const Tensor& x) { return std::get<0>(x.median(-1)); }),
                   unary("norm", [](const Tensor& x) { return x.norm(); }),
                   unary("vector_norm", [](const Tensor& x) { return at::linalg_vector_norm(x, 3, {-1}); }),
                   unary("logsumexp", [](const Tensor& x) { return x.logsumexp(-1); }),
                   unary("cumsum", [](const Tensor& x) { return x.cumsum(1); }),
                   unary("cumprod", [](const Tensor& x) { return x.cumprod(1); }),
                   unary("softmax", [](const Tensor& x) { return x.softmax(-1); }),
                   unary("softmax_inner", [](const Tensor& x) { return x.softmax(1); }),
                   unary("log_softmax", [](const Tensor& x) { return x.log_softmax(-1); }),
                   unary("any_all", [](const Tensor& x) { return (x > 0).any(1) & (x > -9).all(1); }),
                   unary("any_all_dims",
                         [](const Tensor& x) {
                           return at::any(x > 2, at::IntArrayRef{0, 1});
                         }),
                   unary("argmax", [](const Tensor& x) { return x.argmax(1); }),
                   unary("sort", [](const Tensor& x) { return std::get<0>(x.sort(1, true)); }),
                   unary("topk", [](const Tensor& x) { return std::get<0>(x.topk(2)); }),
                   unary("kthvalue", [](const Tensor& x) { return std::get<0>(x.kthvalue(2)); }),
                   unary("bincount_histc", [](const Tensor& x) { return at::histc(x.detach(), 10); }),
               });
}

void add_shapes(std::vector<OperatorCase>& cases) {
  cases.insert(cases.end(), {
                                unary("transpose", [](const Tensor& x) { return x.transpose(0, 2) * 2; }),
                                unary("permute_contiguous",
                                      [](const Tensor& x) {
                                        return x.permute({2, 0, 1}).contiguous();
                                      }),
                                unary("slice_step", [](const Tensor& x) { return x.slice(1, 1, 5, 2) + 1; }),
                                unary("select_unsqueeze",
                                      [](const Tensor& x) {
                                        return x.select(1, 2).unsqueeze(0).expand({2, 3, 4}).sum(0);
                                      }),
                                unary("split_cat",
                                      [](const Tensor& x) {
                                        const auto parts = x.split(2, 1);
                                        return at::cat({parts[2], parts[0]}, 1);
                                      }),
                                unary("chunk_stack",
                                      [](const Tensor& x) {
                                        return at::stack({x.chunk(2, 2)[0], x.chunk(2, 2)[1]});
                                      }),
                                unary("unbind", [](const Tensor& x) { return x.unbind(0)[1] * 3; }),
                                unary("reshape_copy", [](const Tensor& x) { return x.transpose(0, 1).reshape({-1}); }),
                                unary("flip_roll", [](const Tensor& x) { return x.flip({1}).roll(2, 0); }),
                                unary("repeat_tile",
                                      [](const Tensor& x) {
                                        return x.repeat({2, 1, 3});
                                      }),
                                unary("repeat_interleave", [](const Tensor& x) { return x.repeat_interleave(3, 1); }),
                                unary("pad",
                                      [](const Tensor& x) {
                                        return at::constant_pad_nd(x, {1, 2, 0, 1}, 0.5);
                                      }),
                                unary("tril_triu", [](const Tensor& x) { return x.tril() + x.triu(1); }),
                                unary("diagonal", [](const Tensor& x) { return x.diagonal(0, 1, 2) * 2; }),
                                unary("unfold", [](const Tensor& x) { return x.unfold(1, 3, 1).sum(-1); }),
                                unary("as_strided",
                                      [](const Tensor& x) {
                                        return x.as_strided({2, 3}, {4, 1}, 3) * 2;
                                      }),
                                unary("channel_shuffle",
                                      [](const Tensor& x) {
                                        return at::channel_shuffle(x.view({1, 4, 5, 3}), 2);
                                      }),
                                unary("masked_fill", [](const Tensor& x) { return x.masked_fill(x > 0, -1.5); }),
                                unary("masked_select", [](const Tensor& x) { return x.masked_select(x > 0); }),
                                unary("nonzero", [](const Tensor& x) { return (x > 0.5).nonzero(); }),
                                unary("complex",
                                      [](const Tensor& x) {
                                        return at::view_as_real(at::view_as_complex(x.view({3, 5, 2, 2})).conj() * 2);
                                      }),
                            });
  const auto with_rows = [] { return Tensors{real({6, 8}), ints({4}, 6)}; };
  cases.insert(
      cases.end(),
      {
          general("index_select", with_rows, [](const Tensors& in) { return in[0].index_select(0, in[1]); }),
          general("index", with_rows, [](const Tensors& in) { return in[0].index({in[1]}); }),
          general("index_mask", with_rows, [](const Tensors& in) { return in[0].index({in[0] > 0}); }),
          general(
              "index_put_accumulate", with_rows,
              [](const Tensors& in) { return in[0].index_put({in[1]}, in[0].narrow(0, 1, 4), /*accumulate=*/true); }),
          general("index_add", with_rows,
                  [](const Tensors& in) { return in[0].index_add(0, in[1], in[0].narrow(0, 2, 4)); }),
          general(
              "gather",
              [] {
                return Tensors{real({6, 8}), ints({6, 3}, 8)};
              },
              [](const Tensors& in) { return in[0].gather(1, in[1]); }),
          general(
              "scatter_add",
              [] {
                return Tensors{real({6, 8}), ints({6, 3}, 8)};
              },
              [](const Tensors& in) { return in[0].scatter_add(1, in[1], in[0].narrow(1, 0, 3)); }),
          general(
              "take_along",
              [] {
                return Tensors{real({6, 8}), ints({6, 2}, 8)};
              },
              [](const Tensors& in) { return at::take_along_dim(in[0], in[1], 1); }),
          general(
              "searchsorted", [] { return Tensors{real({20})}; },
              [](const Tensors& in) { return at::searchsorted(std::get<0>(in[0].detach().sort()), in[0].detach()); }),
          general(
              "unique", [] { return Tensors{ints({30})}; },
              [](const Tensors& in) { return std::get<0>(at::_unique2(in[0])); }),
          general(
              "one_hot", [] { return Tensors{ints({7})}; }, [](const Tensors& in) { return at::one_hot(in[0], 8); }),
          general(
              "int_arithmetic",
              [] {
                return Tensors{ints({9}) + 1, ints({9}) + 1};
              },
              [](const Tensors& in) { return (in[0] * 7).remainder(in[1]) + at::bitwise_xor(in[0], in[1]); }),
          general(
              "floor_divide",
              [] {
                return Tensors{ints({9}) + 1, ints({9}) + 1};
              },
              [](const Tensors& in) { return at::floor_divide(in[0] * 7, in[1]); }),
      });
}

void add_networks(std::vector<OperatorCase>& cases) {
  const auto matrices = [] { return Tensors{real({5, 6}), real({6, 7}), real({5, 7})}; };
  const auto batches = [] { return Tensors{real({3, 5, 6}), real({3, 6, 7}), real({3, 5, 7})}; };
  const auto image = [] { return Tensors{real({2, 4, 9, 9}), real({6, 4, 3, 3}), real({6})}; };
  const auto channels_last = [image] {
    auto in = image();
    in[0] = in[0].contiguous(at::MemoryFormat::ChannelsLast);
    in[1] = in[1].contiguous(at::MemoryFormat::ChannelsLast);
    return in;
  };
  const auto heads = [] { return Tensors{real({2, 4, 16, 8}), real({2, 4, 16, 8}), real({2, 4, 16, 8})}; };
  const auto classes = [] { return Tensors{real({10, 8}), ints({10})}; };
  cases.insert(
      cases.end(),
      {
          general("mm", matrices, [](const Tensors& in) { return in[0].mm(in[1]); }),
          general("addmm", matrices, [](const Tensors& in) { return at::addmm(in[2], in[0], in[1], 0.5, 2); }),
          general(
              "addr",
              [] {
                return Tensors{real({3, 4}), real({3}), real({4})};
              },
              [](const Tensors& in) { return at::addr(in[0], in[1], in[2], 0.5, 2); }),
          general("bmm", batches, [](const Tensors& in) { return in[0].bmm(in[1]); }),
          general("baddbmm", batches, [](const Tensors& in) { return at::baddbmm(in[2], in[0], in[1]); }),
          general(
              "matmul_broadcast",
              [] {
                return Tensors{real({2, 3, 5, 6}), real({6, 7})};
              },
              [](const Tensors& in) { return in[0].matmul(in[1]); }),
          general("einsum", batches,
                  [](const Tensors& in) {
                    return at::einsum("bik,bkj->bij", {in[0], in[1]});
                  }),
          general(
              "linear",
              [] {
                return Tensors{real({2, 3, 8}), real({5, 8}), real({5})};
              },
              [](const Tensors& in) { return at::linear(in[0], in[1], in[2]); }),
          general(
              "embedding",
              [] {
                return Tensors{real({9, 4}), ints({3, 5}, 9)};
              },
              [](const Tensors& in) { return at::embedding(in[0], in[1], /*padding_idx=*/2); }),
          general(
              "layer_norm",
              [] {
                return Tensors{real({4, 5, 8}), real({8}), real({8})};
              },
              [](const Tensors& in) { return at::layer_norm(in[0], {8}, in[1], in[2]); }),
          general(
              "rms_norm",
              [] {
                return Tensors{real({4, 5, 8}), real({8})};
              },
              [](const Tensors& in) { return at::rms_norm(in[0], {8}, in[1]); }),
          general(
              "group_norm",
              [] {
                return Tensors{real({2, 6, 5}), real({6}), real({6})};
              },
              [](const Tensors& in) { return at::group_norm(in[0], 3, in[1], in[2]); }),
          general(
              "batch_norm",
              [] {
                return Tensors{real({4, 6, 5}), real({6}), real({6})};
              },
              [](const Tensors& in) { return at::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false); }),
          general("conv2d", image, [](const Tensors& in) { return at::conv2d(in[0], in[1], in[2], 2, 1); }),
          general("conv2d_channels_last", channels_last,
                  [](const Tensors& in) { return at::conv2d(in[0], in[1], in[2], 1, 1); }),
          general(
              "conv2d_grouped",
              [] {
                return Tensors{real({2, 4, 9, 9}), real({6, 2, 3, 3})};
              },
              [](const Tensors& in) { return at::conv2d(in[0], in[1], {}, 1, 1, 1, 2); }),
          general(
              "conv1d",
              [] {
                return Tensors{real({2, 4, 12}), real({5, 4, 3}), real({5})};
              },
              [](const Tensors& in) { return at::conv1d(in[0], in[1], in[2], 1, 2, 2); }),
          general(
              "conv_transpose2d",
              [] {
                return Tensors{real({2, 4, 5, 5}), real({4, 3, 3, 3}), real({3})};
              },
              [](const Tensors& in) { return at::conv_transpose2d(in[0], in[1], in[2], 2, 1, 1); }),
          general("max_pool2d", image, [](const Tensors& in) { return at::max_pool2d(in[0], 3, 2); }),
          general("avg_pool2d", image, [](const Tensors& in) { return at::avg_pool2d(in[0], 3); }),
          general("adaptive_avg_pool2d", image,
                  [](const Tensors& in) {
                    return at::adaptive_avg_pool2d(in[0], {2, 2});
                  }),
          general("upsample", image,
                  [](const Tensors& in) {
                    return at::upsample_bilinear2d(in[0], {12, 12}, false);
                  }),
          general(
              "attention_causal", heads,
              [](const Tensors& in) { return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.0, true); }),
          general("attention_mask", heads,
                  [](const Tensors& in) {
                    const auto mask = at::ones({16, 16}, in[0].options().dtype(at::kBool)).tril();
                    return at::scaled_dot_product_attention(in[0], in[1], in[2], mask);
                  }),
          general(
              "attention_dropout", heads,
              [](const Tensors& in) { return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.5, true); }),
          general(
              "attention_grouped_queries",
              [] {
                return Tensors{real({2, 4, 16, 8}), real({2, 2, 16, 8}), real({2, 2, 16, 8})};
              },
              [](const Tensors& in) {
                return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.0, true, {}, /*enable_gqa=*/true);
              }),
          general("cross_entropy", classes,
                  [](const Tensors& in) { return at::cross_entropy_loss(in[0], in[1], {}, 1, 3, 0.1); }),
          general("nll_loss", classes, [](const Tensors& in) { return at::nll_loss(in[0].log_softmax(-1), in[1]); }),
          general("mse_huber", classes,
                  [](const Tensors& in) { return at::mse_loss(in[0], in[0] * 2) + at::huber_loss(in[0], in[0] * 3); }),
          general("bce_with_logits", classes,
                  [](const Tensors& in) {
                    return at::binary_cross_entropy_with_logits(in[0], at::ones_like(in[0]) * 0.3);
                  }),
          general("dropout", classes, [](const Tensors& in) { return at::dropout(in[0], 0.4, true); }),
          general("bernoulli", classes, [](const Tensors& in) { return at::bernoulli(in[0].detach().sigmoid()); }),
          general("multinomial", classes,
                  [](const Tensors& in) { return at::multinomial(in[0].detach().softmax(1), 3); }),
          general("linalg_qr", matrices, [](const Tensors& in) { return std::get<0>(at::linalg_qr(in[0])).abs(); }),
          general(
              "cholesky_solve",
              [] {
                return Tensors{real({6, 6}), real({6, 2})};
              },
              [](const Tensors& in) {
                return at::linalg_solve(in[0].mm(in[0].t()) + at::eye(6, in[0].options()), in[1]);
              }),
          general(
              "fft",
              [] {
                return Tensors{real({4, 16})};
              },
              [](const Tensors& in) { return at::view_as_real(at::fft_rfft(in[0])); }),
          general(
              "rnn_cell",
              [] {
                return Tensors{real({3, 4}), real({3, 5}), real({5, 4}), real({5, 5})};
              },
              [](const Tensors& in) { return at::rnn_tanh_cell(in[0], in[1], in[2], in[3]); }),
      });
}

std::vector<OperatorCase> all_cases() {
  std::vector<OperatorCase> cases;
  add_pointwise(cases);
  add_reductions(cases);
  add_shapes(cases);
  add_networks(cases);
  return cases;
}

class Operators : public SimTest, public ::testing::WithParamInterface<OperatorCase> {};

// Results and input gradients.
Tensors run(const OperatorCase& op, const Tensors& cpu_inputs, c10::Device device) {
  Tensors inputs;
  for (const auto& t : cpu_inputs) {
    auto copy = t.to(device, t.scalar_type(), false, /*copy=*/true);
    inputs.push_back(t.is_floating_point() ? copy.set_requires_grad(true) : copy);
  }
  at::manual_seed(7);
  Tensors results = op.run(inputs);
  for (const auto& t : results) EXPECT_EQ(t.device(), device);
  Tensor total;
  for (const auto& t : results) {
    if (!t.requires_grad()) continue;
    const auto weighted = (t * at::arange(1, t.numel() + 1, t.options()).view_as(t)).sum();
    total = total.defined() ? total + weighted : weighted;
  }
  if (total.defined()) {
    total.backward();
    for (const auto& t : inputs) results.push_back(t.grad());
  }
  return results;
}

TEST_P(Operators, EqualTheCpuForwardAndBackward) {
  at::manual_seed(1);
  const auto inputs = GetParam().make_inputs();
  EXPECT_TRUE(bit_equal(run(GetParam(), inputs, sim()), run(GetParam(), inputs, at::kCPU)));
}

INSTANTIATE_TEST_SUITE_P(Sweep, Operators, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace neap::testing
