#include "neap/train/model_in_pieces.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "neap/device/device.h"
#include "neap/models/hugging_face.h"
#include "neap/shard/fully_shard.h"
#include "testing/llama_config.h"
#include "testing/matchers.h"
#include "testing/ranks.h"
#include "testing/sim_fixture.h"

namespace neap::train {
namespace {

namespace fs = std::filesystem;
using testing::bit_equal;

constexpr int kRanks = 4;
constexpr uint64_t kSeed = 3;
const bool kEnoughDevices = testing::use_sim_devices(kRanks);

models::ModelConfig small() { return testing::small_llama(/*vocabulary=*/97); }

int64_t bytes_of(const torch::nn::Module& model) {
  int64_t bytes = 0;
  for (const at::Tensor& parameter : model.parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

class ModelInPieces : public testing::SimTest {
 protected:
  void SetUp() override {
    ASSERT_TRUE(kEnoughDevices);
    SimTest::SetUp();
  }

  // Builds the model of `section` on every rank's own device, and compares its pieces with `whole`.
  void expect_pieces_of(const models::CausalLM& whole, const ModelSection& section) {
    const int64_t total = bytes_of(whole);
    testing::run_ranks(kRanks, [&](comm::World& world) {
      const auto model = model_without_memory(whole.config());
      device::Device& device = device::Device::of(testing::sim(world.rank()));
      const int64_t before = device.memory_stats()->allocated.count;
      device.reset_peak();
      shard::Sharded sharded = shard_and_fill(*model, world.groups(comm::Mesh(kRanks, world.rank())), {},
                                              device.c10_device(), section, kSeed);
      const int64_t shards = sharded.usage().shards.count;
      EXPECT_LT(shards, total / 2);
      // What a copy from the host may need beside them is far less than a parameter.
      EXPECT_LE(device.memory_stats()->allocated_peak.count - before, shards + 4096);
      const auto parameters = whole.named_parameters();
      for (const shard::Shard& shard : sharded.shards()) {
        const at::Tensor expected = parameters[shard.name].detach().view(-1).slice(0, shard.begin, shard.end);
        EXPECT_TRUE(bit_equal(shard.data.cpu(), expected)) << shard.name;
      }
    });
  }
};

TEST_F(ModelInPieces, RandomWeightsHaveTheBitsOfOneProcess) {
  const auto whole = models::make_model(small(), {}, kSeed);
  expect_pieces_of(*whole, {.path = "", .init = Init::kRandom});
}

TEST_F(ModelInPieces, FilesAreReadPieceByPieceInAnyDtype) {
  std::string dir = (fs::temp_directory_path() / "neap-pieces-XXXXXX").string();
  ASSERT_NE(::mkdtemp(dir.data()), nullptr);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto saved = models::make_model(small(), at::TensorOptions().dtype(dtype), kSeed);
    models::save_hf(*saved, dir);
    expect_pieces_of(*models::model_from_hf(dir), {.path = dir, .init = Init::kPretrained});
  }
  fs::remove_all(dir);
}

}  // namespace
}  // namespace neap::train
