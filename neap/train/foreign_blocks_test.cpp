// Blocks of MindFormers and VeOmni: what they come to, and every wrong use of them, through the reader of run files.
#include "neap/train/foreign_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/error.h"
#include "neap/train/schema.h"
#include "neap/train/yaml_config.h"
#include "testing/error_of.h"

namespace neap::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// Lines 1 and 2 of every file below.
constexpr const char* kOwn = "model: {path: m}\ndata: {path: d}\n";

RunConfig read(const std::string& yaml, const std::vector<Override>& overrides = {}) {
  return parse_config(kOwn + yaml, "run.yaml", overrides);
}

std::string block_error(const std::string& yaml, const std::vector<Override>& overrides = {}) {
  return testing::error_of([&] { read(yaml, overrides); });
}

std::string demand_error(const std::string& yaml, int64_t layers, const std::vector<Override>& overrides = {}) {
  return testing::error_of([&] { check_demands(read(yaml, overrides).demands, layers); });
}

// ---- MindFormers: swap

TEST(Swap, EveryEntryOfLayerSwapCounts) {
  const RunConfig config = read(
      "swap:\n  enable: True\n  default_prefetch: 1\n  layer_swap:\n    - layers: ['0-3']\n    - layers: [9, '7-5']\n"
      "    - layers: 10\n");
  EXPECT_EQ(config.offload.options.mode, offload::Mode::kAsync);
  EXPECT_EQ(config.offload.options.prefetch, offload::Prefetch(offload::Layers{1}));
  EXPECT_THAT(config.offload.layers, ElementsAre("0-3", "9", "7-5", "10"));
  EXPECT_THAT(config.offload.modules, IsEmpty());
}

TEST(Swap, ModulesOfALayerHaveTheNamesOfHuggingFaceHere) {
  const RunConfig config = read(
      "swap:\n  enable: true\n  op_swap:\n    - {op_name: attention, layers: ['0-1']}\n"
      "    - {op_name: mlp, layers: ['1']}\n");
  EXPECT_THAT(config.offload.modules,
              ElementsAre("model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.1.self_attn"));
}

TEST(Swap, PrefetchCountsLayersWhateverNumberOfUnitsALayerHas) {
  const auto prefetch = [](const std::string& entries) {
    const auto config = read("swap: {enable: true, default_prefetch: 2, " + entries + "}\n");
    return std::get<offload::Layers>(config.offload.options.prefetch).count;
  };
  EXPECT_EQ(prefetch("layer_swap: [{layers: 0-9}]"), 2);
  EXPECT_EQ(prefetch("op_swap: [{op_name: mlp, layers: 0-9}, {op_name: attention, layers: 0-9}]"), 4);
  // A unit of a layer that leaves whole is part of it.
  EXPECT_EQ(prefetch("layer_swap: [{layers: 0-9}], op_swap: [{op_name: mlp, layers: 3}]"), 2);
  // The distance ends with the units.
  EXPECT_EQ(prefetch("layer_swap: [{layers: [0, 4]}]"), 1);
  EXPECT_EQ(prefetch("layer_swap: [{layers: 0}]"), 0);
}

TEST(Swap, WithoutListsItIsEveryLayer) {
  const RunConfig config = read("swap:\n  enable: True\n  layer_swap:\n  op_swap:\n");
  EXPECT_THAT(config.offload.layers, IsEmpty());
  EXPECT_EQ(config.offload.options.mode, offload::Mode::kAsync);
  EXPECT_EQ(demand_error("swap: {enable: true}\n", 4), "no error");
  EXPECT_EQ(demand_error("swap: {enable: true, default_prefetch: 4}\n", 4),
            "[run.yaml:3, swap.default_prefetch] expected less than the number of layers, which is 4; found 4");
}

TEST(Swap, SwitchedOffIsOff) {
  const RunConfig config = read("swap: {enable: False, layer_swap: [{layers: ['0-3']}]}\n");
  EXPECT_EQ(config.offload.options.mode, offload::Mode::kOff);
  EXPECT_THAT(config.demands, IsEmpty());
  EXPECT_EQ(read("swap:\n").offload.options.mode, offload::Mode::kOff);
}

TEST(Swap, LayersAndTheirDistanceMustBeInTheModel) {
  const std::string yaml = "swap:\n  enable: true\n  layer_swap:\n    - layers: ['0-1']\n    - layers: ['0-10']\n";
  EXPECT_EQ(demand_error(yaml, 12), "no error");
  EXPECT_EQ(demand_error(yaml, 10), "[run.yaml:7, swap.layer_swap[1].layers] expected layers from 0 to 9; found 0-10");
  EXPECT_EQ(
      demand_error(yaml, 11),
      "[run.yaml:3, swap.default_prefetch] links every swapped layer with the one that comes 1 later; layer 10 has "
      "none, as the model's layers are 0 to 10; swap fewer layers, or lower it");
  EXPECT_THAT(demand_error("swap: {enable: true, op_swap: [{op_name: mlp, layers: 12}]}\n", 12),
              HasSubstr("swap.op_swap[0].layers] expected layers from 0 to 11; found 12"));
  // The command line has chosen other layers, and another distance.
  EXPECT_EQ(demand_error(yaml, 10, {{"offload.layers", "0"}, {"offload.prefetch", "automatic"}}), "no error");
}

TEST(Swap, WrongUsesNameLineAndPath) {
  const auto swap = [](const std::string& entries) { return block_error("swap: {enable: true, " + entries + "}\n"); };
  EXPECT_EQ(block_error("swap:\n  enabled: true\n"),
            "[run.yaml:4] unknown key swap.enabled; nearest known key: swap.enable");
  EXPECT_EQ(block_error("swap:\n  enable: true\n  layer_swap:\n    - layers: [0]\n    - layer: [1]\n"),
            "[run.yaml:7] unknown key swap.layer_swap[1].layer; nearest known key: swap.layer_swap[1].layers");
  EXPECT_EQ(block_error("swap:\n  enable: on\n"), "[run.yaml:4] swap.enable: expected true or false; found \"on\"");
  EXPECT_EQ(block_error("swap:\n  enable: true\n  enable: false\n"),
            "[run.yaml:5] swap.enable is given twice; keep one");
  EXPECT_EQ(swap("default_prefetch: 0"),
            "[run.yaml:3] swap.default_prefetch: expected an integer from 1 to 1000000; found \"0\"");
  EXPECT_THAT(swap("default_prefetch: soon"), HasSubstr("found \"soon\""));
  EXPECT_THAT(swap("layer_swap: 3"), HasSubstr("swap.layer_swap: expected a list of entries with layers; found \"3\""));
  EXPECT_THAT(swap("layer_swap: [3]"), HasSubstr("swap.layer_swap[0]: expected a section of keys; found \"3\""));
  EXPECT_THAT(swap("layer_swap: [{layers: [0-x]}]"), HasSubstr("swap.layer_swap[0].layers: expected an index or a "));
  EXPECT_THAT(swap("layer_swap: [{layers: []}]"), HasSubstr("expected a list of layers such as"));
  EXPECT_THAT(swap("layer_swap: [{}]"), HasSubstr("swap.layer_swap[0].layers: this key is required"));
  EXPECT_THAT(swap("op_swap: [{layers: [0]}]"), HasSubstr("swap.op_swap[0].op_name: this key is required"));
  EXPECT_THAT(swap("op_swap: [{op_name: 'mlp.*', layers: [0]}]"), HasSubstr("expected the path of a module"));
  EXPECT_THAT(block_error("swap: true\n"), HasSubstr("swap: expected a section of keys; found \"true\""));
}

// ---- MindFormers: recompute

TEST(MindFormersRecompute, IsToldFromOursByItsShape) {
  const RunConfig ours = read("recompute: {mode: full}\n");
  EXPECT_EQ(ours.recompute.mode, RecomputeMode::kFull);
  const RunConfig theirs = read("recompute:\n  mode: full\n  full_recompute_layer: ['0-3']\n");
  EXPECT_EQ(theirs.recompute.mode, RecomputeMode::kSelective);
  EXPECT_THAT(theirs.recompute.layers, ElementsAre("0-3"));
  EXPECT_EQ(read("recompute: {mode: None}\n").recompute.mode, RecomputeMode::kNone);
  EXPECT_EQ(read("recompute: {mode: None, full_recompute_layer: ['0-3']}\n").recompute.mode, RecomputeMode::kNone);
}

TEST(MindFormersRecompute, SelectsModulesOfLayers) {
  const RunConfig config =
      read("recompute:\n  mode: select\n  select_module:\n    attention: ['0-1']\n    mlp: ['2']\n  exclude_op: []\n");
  EXPECT_EQ(config.recompute.mode, RecomputeMode::kSelective);
  EXPECT_THAT(config.recompute.modules,
              ElementsAre("model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.2.mlp"));
}

TEST(MindFormersRecompute, WrongUses) {
  EXPECT_EQ(block_error("recompute:\n  mode: full\n  full_recompute_layer: ['0-3']\n  early_stop: false\n"),
            "[run.yaml:6] recompute.early_stop is a key of our own section, but recompute.full_recompute_layer "
            "(run.yaml:5) is MindFormers'; write the section in one of the two ways");
  EXPECT_THAT(block_error("recompute: {mode: select}\n"),
              HasSubstr("recompute.mode] select needs recompute.select_module"));
  EXPECT_THAT(block_error("recompute: {mode: full, exclude_op: []}\n"),
              HasSubstr("needs recompute.full_recompute_layer"));
  EXPECT_THAT(block_error("recompute: {mode: select, select_module: {}}\n"), HasSubstr("found a section of keys"));
  EXPECT_THAT(block_error("recompute: {mode: select, select_module: {mlp: ['x']}}\n"), HasSubstr("select_module.mlp"));
  EXPECT_THAT(block_error("recompute: {mode: select, select_modul: {mlp: [0]}}\n"),
              HasSubstr("unknown key recompute.select_modul; nearest known key: recompute.select_module"));
  EXPECT_THAT(block_error("recompute: {mode: sometimes, exclude_op: []}\n"),
              HasSubstr("expected None, full or select"));
  EXPECT_THAT(block_error("recompute: {mode: None, exclude_op: [add]}\n"), HasSubstr("whole modules run again"));
  EXPECT_THAT(demand_error("recompute: {mode: full, full_recompute_layer: ['0-4']}\n", 4),
              HasSubstr("recompute.full_recompute_layer] expected layers from 0 to 3; found 0-4"));
}

TEST(RecomputeConfig, IsTheOlderWayToSayIt) {
  EXPECT_EQ(read("recompute_config: {recompute: True}\n").recompute.mode, RecomputeMode::kFull);
  EXPECT_EQ(
      read("recompute_config: {recompute: False, select_recompute: False, mp_comm_recompute: True}\n").recompute.mode,
      RecomputeMode::kNone);
  EXPECT_THAT(read("recompute_config: {recompute: [3]}\n").recompute.layers, ElementsAre("0-2"));
  EXPECT_EQ(read("recompute_config: {recompute: 0}\n").recompute.mode, RecomputeMode::kNone);
  EXPECT_THAT(block_error("recompute_config: {recompute: [3, 4]}\n"), HasSubstr("the number of layers of one stage"));
  EXPECT_THAT(block_error("recompute_config: {select_recompute: {'mul': True}}\n"), HasSubstr("recompute.modules"));
  EXPECT_THAT(block_error("recompute_config: {select_comm_recompute: True}\n"), HasSubstr("expected false"));
  EXPECT_THAT(block_error("recompute: {mode: None}\nrecompute_config: {recompute: true}\n"),
              HasSubstr("recompute_config and recompute (run.yaml:3) both stand for recompute.mode"));
}

// ---- MindFormers: parallelism

TEST(Parallelism, IsOurSectionParallel) {
  const RunConfig config = read(
      "parallelism:\n  data_parallel_shard: 4\n  data_parallel_replicate: 2\n  data_parallel_shard_strategy: "
      "optim_grads\n"
      "  tensor_parallel: 1\n  expert_parallel: 1\n  disable_gradient_division: True\n  cpu_offload: False\n");
  EXPECT_EQ(config.parallel.shard, 4);
  EXPECT_EQ(config.parallel.replicate, 2);
  EXPECT_EQ(config.parallel.stage, ZeroStage::kGradients);
  EXPECT_EQ(read("parallelism: {data_parallel_shard: -1}\n").parallel, ParallelSection{});
  EXPECT_EQ(read("parallelism: {data_parallel_shard_strategy: optim}\n").parallel.stage, ZeroStage::kOptimizer);
  EXPECT_EQ(read("parallelism: {reshard_after_forward_policy: never}\n").parallel.stage, ZeroStage::kGradients);
  EXPECT_EQ(read("parallelism: {reshard_after_forward_policy: always}\n").parallel.stage, ZeroStage::kParameters);
}

TEST(Parallelism, OtherDimensionsAndContradictionsAreErrors) {
  const auto error = [](const std::string& entries) { return block_error("parallelism: {" + entries + "}\n"); };
  for (const char* name : {"tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"}) {
    EXPECT_THAT(error(std::string(name) + ": 2"), StartsWith(std::string("[run.yaml:3] parallelism.") + name +
                                                             ": expected 1, as models are split over ranks"));
  }
  EXPECT_THAT(error("data_parallel_shard: 0"), HasSubstr("expected a number of ranks, or -1"));
  EXPECT_THAT(error("data_parallel_shard: -2"), HasSubstr("expected an integer from -1"));
  EXPECT_THAT(error("data_parallel_shard_strategy: all"),
              HasSubstr("expected optim_grads_params, optim_grads or optim; found \"all\""));
  EXPECT_THAT(error("reshard_after_forward_policy: always, data_parallel_shard_strategy: optim"),
              HasSubstr("keeps them whole"));
  EXPECT_THAT(error("cpu_offload: True"), HasSubstr("parallelism.cpu_offload: expected false"));
  EXPECT_THAT(error("disable_gradient_division: False"), HasSubstr("means over all tokens"));
  EXPECT_THAT(error("data_parallel_shards: 2"), HasSubstr("nearest known key: parallelism.data_parallel_shard"));
}

// ---- VeOmni

RunConfig read_veomni(const std::string& root, const std::string& entries) {
  // `model` and `train` are sections of ours, in which the block lies.
  const std::string nested = "accelerator: {offload_config: {" + entries + "}}";
  const std::string yaml = root == "model" ? "data: {path: d}\nmodel: {path: m, " + nested + "}\n"
                                           : kOwn + ("train: {steps: 7, " + nested + "}\n");
  return parse_config(yaml, "run.yaml", {});
}

std::string veomni_error(const std::string& entries) {
  return testing::error_of([&] { read_veomni("train", entries); });
}

TEST(VeOmni, OffloadConfigLiesUnderTrainOrModel) {
  for (const char* root : {"train", "model"}) {
    const RunConfig config = read_veomni(
        root,
        "enable_async_activation: true, activation_gpu_limit: 0.5, activation_offload_modules: [\"model.layers.{*}\"], "
        "activation_offload_host_cache_limit_gb: 0");
    EXPECT_EQ(config.offload.options.mode, offload::Mode::kAsync) << root;
    EXPECT_EQ(config.offload.options.device_budget, Bytes(int64_t{1} << 29));
    EXPECT_EQ(config.offload.options.host_cache_limit, Bytes(0));
    EXPECT_THAT(config.offload.modules, ElementsAre("model.layers.{*}"));
  }
  EXPECT_EQ(read_veomni("train", "enable_activation: True").offload.options.mode, offload::Mode::kSync);
  EXPECT_EQ(read_veomni("train", "enable_activation: false").offload.options.mode, offload::Mode::kOff);
  EXPECT_EQ(read_veomni("train", "enable_async_activation: true").offload.options.host_cache_limit,
            offload::Options{}.host_cache_limit);
}

TEST(VeOmni, WrongUses) {
  EXPECT_EQ(veomni_error("enable_activation: true, enable_async_activation: true"),
            "[run.yaml:3, train.accelerator.offload_config.enable_async_activation] expected one way of activation "
            "offload; found enable_activation on as well; switch one of them off");
  EXPECT_THAT(veomni_error("activation_offload_modules: [\"model.layers.{*}\"]"),
              HasSubstr("activation_offload_modules] expected enable_async_activation: true or"));
  EXPECT_THAT(veomni_error("enable_activation: true, activation_gpu_limit: -1"),
              HasSubstr("offload_config.activation_gpu_limit: expected a number of at least 0; found \"-1\""));
  for (const char* bad : {"nan", "inf", "-0.5", "much"}) {
    EXPECT_THAT(
        veomni_error(std::string("enable_async_activation: true, activation_offload_host_cache_limit_gb: ") + bad),
        HasSubstr("expected a number of at least 0"));
  }
  EXPECT_THAT(veomni_error("enable_activation: true, activation_gpu_limit: 1e300"), HasSubstr("fit 64 bits"));
  EXPECT_THAT(veomni_error("enable_activations: true"),
              HasSubstr("nearest known key: train.accelerator.offload_config.enable_activation"));
  EXPECT_THAT(
      block_error("train: {accelerator: {fsdp_config: {}}}\n"),
      HasSubstr("unknown key train.accelerator.fsdp_config; nearest known key: train.accelerator.offload_config"));
}

// ---- together with our own sections

TEST(ForeignBlocks, AKeyHasOneSource) {
  EXPECT_EQ(block_error("swap: {enable: true}\noffload:\n  mode: sync\n"),
            "[run.yaml:5] offload.mode is what swap (run.yaml:3) stands for, too; keep one of the two");
  EXPECT_THAT(block_error("offload: {layers: [0]}\nswap: {enable: true, op_swap: [{op_name: mlp, layers: [1]}]}\n"),
              HasSubstr("offload.layers is what swap (run.yaml:4) stands for"));
  EXPECT_THAT(block_error("swap: {enable: true}\ntrain: {accelerator: {offload_config: {enable_activation: true}}}\n"),
              HasSubstr("both stand for offload.mode"));
  EXPECT_THAT(block_error("parallelism: {data_parallel_shard: 2}\nparallel: {shard: 2}\n"),
              HasSubstr("parallel.shard is what parallelism (run.yaml:3) stands for"));
  // What a block says nothing about stays ours.
  EXPECT_EQ(read("swap: {enable: true}\noffload: {min_bytes: 7}\n").offload.options.min_bytes, Bytes(7));
  EXPECT_EQ(read("parallelism: {data_parallel_shard: 2}\nparallel: {stage: optim}\n").parallel.stage,
            ZeroStage::kOptimizer);
}

TEST(ForeignBlocks, TheCommandLineWinsAndTakesOurKeys) {
  EXPECT_EQ(read("swap: {enable: true}\n", {{"offload.mode", "sync"}}).offload.options.mode, offload::Mode::kSync);
  EXPECT_THAT(block_error("", {{"swap.enable", "true"}}),
              StartsWith("[--swap.enable] blocks of other systems are read from the run file alone"));
  EXPECT_THAT(block_error("", {{"train.accelerator.offload_config.enable_activation", "true"}}),
              HasSubstr("from the run file alone"));
}

TEST(ForeignBlocks, TheResolvedConfigurationHasOurSectionsAlone) {
  const RunConfig config = read(
      "swap: {enable: true, layer_swap: [{layers: ['0-2']}]}\nparallelism: {data_parallel_shard: 2}\n"
      "recompute: {mode: select, select_module: {mlp: ['1-2']}}\n");
  const std::string text = to_yaml(config);
  EXPECT_THAT(text, HasSubstr("offload:\n  mode: async\n"));
  EXPECT_THAT(text, HasSubstr("  layers: [\"0-2\"]\n"));
  EXPECT_THAT(text, HasSubstr("  modules: [\"model.layers.1.mlp\", \"model.layers.2.mlp\"]\n"));
  EXPECT_THAT(text, Not(HasSubstr("swap")));
  EXPECT_EQ(to_yaml(parse_config(text, "again.yaml", {})), text);
}

TEST(ForeignBlocks, EveryKeyIsDocumented) {
  const std::string page = markdown_page();
  for (const char* key : {"`swap.layer_swap[].layers`", "`recompute.select_module`", "`recompute_config.recompute`",
                          "`parallelism.data_parallel_shard_strategy`", "`offload_config.enable_async_activation`"}) {
    EXPECT_THAT(page, HasSubstr(key));
  }
}

}  // namespace
}  // namespace neap::train
