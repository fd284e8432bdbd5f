// Autocast casts on sim where it casts on any accelerator.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "testing/matchers.h"
#include "testing/sim_fixture.h"
#include "testing/tiny_llama.h"

namespace neap::testing {
namespace {

class Autocast : public SimTest {
 protected:
  // RAII: bfloat16 autocast on sim.
  class On {
   public:
    On() {
      at::autocast::set_autocast_enabled(kSim, true);
      at::autocast::set_autocast_dtype(kSim, at::kBFloat16);
    }
    ~On() {
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(kSim, false);
    }
  };
};

TEST_F(Autocast, ProductsRunInLowerPrecision) {
  const auto a = at::randn({8, 8}), b = at::randn({8, 8});
  const auto x = a.to(sim()), w = b.to(sim());
  const On autocast;
  for (const auto& product : {x.mm(w), x.matmul(w), at::linear(x, w)}) EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(bit_equal(x.mm(w), a.to(at::kBFloat16).mm(b.to(at::kBFloat16))));
  const auto heads = at::randn({1, 2, 8, 8}, on_sim());
  EXPECT_EQ(at::scaled_dot_product_attention(heads, heads, heads).scalar_type(), at::kBFloat16);
}

TEST_F(Autocast, DelicateOperatorsRunInFullPrecision) {
  const auto half = at::randn({8, 8}, on_sim()).to(at::kBFloat16);
  const On autocast;
  EXPECT_EQ(half.exp().scalar_type(), at::kFloat);
  EXPECT_EQ(half.softmax(-1).scalar_type(), at::kFloat);
  EXPECT_EQ(half.sum().scalar_type(), at::kFloat);
  EXPECT_EQ(at::layer_norm(half, {8}).scalar_type(), at::kFloat);
  EXPECT_EQ(half.norm(at::Scalar(2)).scalar_type(), at::kFloat);
}

TEST_F(Autocast, TheWidestOfTheInputsWins) {
  const auto half = at::ones({8}, on_sim().dtype(at::kBFloat16)), full = at::ones({8}, on_sim());
  const On autocast;
  EXPECT_EQ(at::cat({half, full}).scalar_type(), at::kFloat);
  EXPECT_EQ(at::addcmul(half, full, half).scalar_type(), at::kFloat);
  EXPECT_EQ((half + half).scalar_type(), at::kBFloat16);
}

TEST_F(Autocast, RefusesProbabilitiesInLowerPrecision) {
  const auto p = at::full({4}, 0.5, on_sim());
  const On autocast;
  EXPECT_THROW(at::binary_cross_entropy(p, p), c10::Error);
}

TEST_F(Autocast, AModelTrainsWithMasterWeightsInFullPrecision) {
  TinyLlama model({}, sim()), again({}, sim());
  const auto step = [](TinyLlama& m) {
    at::Tensor loss;
    {
      const On autocast;
      loss = m.loss(m.tokens(0));
    }
    loss.backward();
    return loss;
  };
  const auto loss = step(model);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  for (const auto& gradient : gradients(model.parameters())) EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  EXPECT_TRUE(bit_equal(step(again), loss));
  EXPECT_TRUE(bit_equal(gradients(again.parameters()), gradients(model.parameters())));
  TinyLlama full({}, sim());
  EXPECT_NEAR(full.loss(full.tokens(0)).item<float>(), loss.item<float>(), 0.05);
}

}  // namespace
}  // namespace neap::testing
