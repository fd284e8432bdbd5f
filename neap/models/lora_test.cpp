#include "neap/models/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "neap/models/causal_lm.h"
#include "neap/models/hugging_face.h"
#include "testing/error_of.h"
#include "testing/llama_config.h"

namespace neap::models {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

std::shared_ptr<CausalLM> tiny_model(bool tied = true) {
  auto config = testing::small_llama(/*vocabulary=*/61);
  config.tie_word_embeddings = tied;
  return make_model(config, {}, 3);
}

struct Tokens {
  at::Tensor ids = at::randint(0, 61, {2, 9}, at::kLong);
  at::Tensor labels = at::randint(0, 61, {2, 9}, at::kLong);
};

void randomise(const NamedTensors& adapters) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : adapters) tensor.normal_(0, 0.3);
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class LoraTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(5);
    std::string pattern = (fs::temp_directory_path() / "neap-lora-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { fs::remove_all(dir_); }

  fs::path dir_;
};

TEST_F(LoraTest, AnAdapterAddsItsShareAndItsGradientsAreThoseOfTheFormula) {
  struct Root : torch::nn::Module {
    std::shared_ptr<Linear> proj = register_module("proj", std::make_shared<Linear>(6, 5, true, at::TensorOptions()));
  } root;
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : root.parameters()) parameter.normal_();
  }
  EXPECT_THAT(add_lora(root, {.rank = 3, .alpha = 6, .modules = {"proj"}}, 1), ElementsAre("proj"));
  const NamedTensors adapters = lora_state(root);
  ASSERT_EQ(adapters.size(), 2);
  EXPECT_EQ(adapters[0].first, "proj.lora_A.weight");
  EXPECT_EQ(adapters[1].first, "proj.lora_B.weight");
  randomise(adapters);

  const at::Tensor x = at::randn({4, 6}).set_requires_grad(true);
  const at::Tensor grad = at::randn({4, 5});
  const at::Tensor y = root.proj->forward(x);
  y.backward(grad);

  const at::NoGradGuard no_grad;
  const at::Tensor a = adapters[0].second, b = adapters[1].second;
  const at::Tensor merged = root.proj->weight + 2 * at::mm(b, a);
  EXPECT_TRUE(at::allclose(y, at::linear(x, merged, root.proj->bias), 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(x.grad(), at::mm(grad, merged), 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(b.grad(), 2 * at::mm(grad.t(), at::mm(x, a.t())), 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(a.grad(), 2 * at::mm(at::mm(grad, b).t(), x), 1e-5, 1e-5));
  EXPECT_FALSE(root.proj->weight.grad().defined());
  EXPECT_FALSE(root.proj->bias.grad().defined());
}

TEST_F(LoraTest, NewAdaptersChangeNothingAndOnlyTheyAreTrained) {
  for (const bool tied : {true, false}) {
    const auto model = tiny_model(tied);
    const Tokens tokens;
    const at::Tensor before = model->loss(tokens.ids, tokens.labels).detach();
    const auto names = add_lora(*model, {.rank = 4, .modules = {"q_proj", "down_proj"}}, 1);
    EXPECT_EQ(names.size(), 6);
    const at::Tensor loss = model->loss(tokens.ids, tokens.labels);
    EXPECT_TRUE(loss.detach().equal(before));
    loss.backward();
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(item.value().requires_grad(), is_lora_parameter(item.key())) << item.key();
      EXPECT_EQ(item.value().grad().defined(), is_lora_parameter(item.key())) << item.key();
    }
  }
}

TEST_F(LoraTest, OneSeedGivesOneAdapter) {
  const auto first = tiny_model(), second = tiny_model(), other = tiny_model();
  add_lora(*first, {}, 9);
  add_lora(*second, {}, 9);
  add_lora(*other, {}, 10);
  const NamedTensors a = lora_state(*first), b = lora_state(*second), c = lora_state(*other);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(a[i].second.equal(b[i].second));
    const bool is_b = a[i].first.ends_with("lora_B.weight");
    EXPECT_EQ(a[i].second.equal(c[i].second), is_b) << a[i].first;
    EXPECT_EQ(a[i].second.abs().max().item<double>() == 0, is_b) << a[i].first;
  }
}

TEST_F(LoraTest, ModulesAreChosenByTheirLastNameByPatternOrAll) {
  EXPECT_EQ(add_lora(*tiny_model(), {.modules = {"all-linear"}}, 1).size(), 3 * 7);
  EXPECT_EQ(add_lora(*tiny_model(/*tied=*/false), {.modules = {"all-linear"}}, 1).size(), 3 * 7);  // not the head
  EXPECT_THAT(add_lora(*tiny_model(), {.modules = {"model.layers.{*}.self_attn.k_proj"}}, 1),
              ElementsAre("model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj",
                          "model.layers.2.self_attn.k_proj"));
  EXPECT_THAT(add_lora(*tiny_model(), {.modules = {"model.layers.1.mlp.up_proj", "model.layers.1.*.up_proj"}}, 1),
              ElementsAre("model.layers.1.mlp.up_proj"));
}

TEST_F(LoraTest, WhatCannotBeAdaptedIsNamedAndTheModelIsUnchanged) {
  const auto model = tiny_model(/*tied=*/false);
  EXPECT_THAT(error_of([&] { add_lora(*model, {.modules = {"q_porj"}}, 1); }),
              AllOf(HasSubstr("[lora.modules]"), HasSubstr("k_proj, o_proj, q_proj"), HasSubstr("found q_porj")));
  EXPECT_THAT(error_of([&] { add_lora(*model, {.modules = {"lm_head"}}, 1); }), HasSubstr("takes no adapter"));
  EXPECT_THAT(error_of([&] { add_lora(*model, {.modules = {"model.layers.{*}.self_attn"}}, 1); }),
              HasSubstr("[lora.modules]"));
  EXPECT_THAT(error_of([&] { add_lora(*model, {.modules = {}}, 1); }), HasSubstr("found none"));
  EXPECT_THAT(error_of([&] { add_lora(*model, {.rank = 0}, 1); }), HasSubstr("[lora.rank]"));
  for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.requires_grad());
  EXPECT_TRUE(lora_state(*model).empty());
  add_lora(*model, {}, 1);
  EXPECT_THAT(error_of([&] { add_lora(*model, {}, 1); }), HasSubstr("expected a model without adapters"));
}

TEST_F(LoraTest, DropoutIsOfTrainingAlone) {
  const auto model = tiny_model();
  add_lora(*model, {.dropout = 0.5, .modules = {"all-linear"}}, 1);
  randomise(lora_state(*model));
  const Tokens tokens;
  const auto loss = [&] { return model->loss(tokens.ids, tokens.labels).detach(); };
  EXPECT_FALSE(loss().equal(loss()));
  model->eval();
  EXPECT_TRUE(loss().equal(loss()));
}

TEST_F(LoraTest, ADirectoryGivesTheSameAdapterAndTheModelsOwnFilesDoNotChange) {
  const auto model = tiny_model();
  save_hf(*model, dir_ / "before");
  LoraOptions options{.rank = 2, .alpha = 5, .modules = {"v_proj", "gate_proj"}};
  options.modules = add_lora(*model, options, 1);
  randomise(lora_state(*model));
  save_lora(lora_state(*model), dir_ / "adapter", options, "models/tiny");
  save_hf(*model, dir_ / "after");
  EXPECT_EQ(bytes_of(dir_ / "after" / "model.safetensors"), bytes_of(dir_ / "before" / "model.safetensors"));

  const auto again = model_from_hf(dir_ / "after");
  const LoraOptions loaded = load_lora(*again, dir_ / "adapter");
  EXPECT_EQ(loaded.rank, 2);
  EXPECT_EQ(loaded.alpha, 5);
  EXPECT_THAT(loaded.modules, ::testing::UnorderedElementsAreArray(options.modules));
  const Tokens tokens;
  EXPECT_TRUE(again->loss(tokens.ids, tokens.labels).equal(model->loss(tokens.ids, tokens.labels)));
}

TEST_F(LoraTest, AnAdapterOfAnotherModelIsListedAndTheModelIsUnchanged) {
  auto config = testing::small_llama(/*vocabulary=*/61);
  config.hidden_size = 64;
  const auto wide = make_model(config);
  LoraOptions options{.rank = 2, .modules = {"v_proj", "down_proj"}};
  options.modules = add_lora(*wide, options, 1);
  save_lora(lora_state(*wide), dir_, options, "");

  const auto model = tiny_model();
  EXPECT_THAT(
      error_of([&] { load_lora(*model, dir_); }),
      AllOf(HasSubstr("the adapter does not fit the model:"),
            HasSubstr("misshapen: model.layers.0.self_attn.v_proj.lora_A.weight is [2, 64], expected [2, 32]")));
  auto deeper = testing::small_llama(/*vocabulary=*/61);
  deeper.num_hidden_layers = 2;
  EXPECT_THAT(error_of([&] { load_lora(*make_model(deeper), dir_); }),
              AllOf(HasSubstr("does not fit"), HasSubstr("model.layers.2")));
  NamedTensors half = lora_state(*wide);
  half.pop_back();
  save_lora(half, dir_, options, "");
  EXPECT_THAT(error_of([&] { load_lora(*wide, dir_); }), HasSubstr("without adapters"));
  EXPECT_THAT(error_of([&] { load_lora(*make_model(config), dir_); }),
              HasSubstr("missing: model.layers.2.mlp.down_proj.lora_B.weight"));
  fs::remove(dir_ / "adapter_model.safetensors");
  EXPECT_THAT(error_of([&] { load_lora(*model, dir_); }), HasSubstr("adapter_model.safetensors"));
  EXPECT_TRUE(lora_state(*model).empty());
}

}  // namespace
}  // namespace neap::models
