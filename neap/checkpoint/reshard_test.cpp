// Checkpoints that one world saves and another loads: ranks as threads, pieces as neap/shard cuts them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/checkpoint/saver.h"
#include "neap/checkpoint/test_support.h"
#include "testing/matchers.h"
#include "testing/sharded_training.h"

namespace neap::checkpoint {
namespace {

using testing::bit_equal;
using testing::run_ranks;
using testing::TestNet;
using testing::TestUnit;
using Model = std::map<std::string, at::Tensor>;

struct Cut {
  std::string name;
  int ranks;
  int replicas = 1;
  shard::Options options = {};
};

// Scalars, nothing, less than a world, uneven, and two dtypes.
std::shared_ptr<TestNet> hard_model(uint64_t seed) {
  std::vector<std::shared_ptr<TestUnit>> units;
  for (uint64_t unit = 0; unit < 2; ++unit) {
    std::vector<at::Tensor> parameters;
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {0, 4}, {1}, {3}, {5, 7}}) {
      parameters.push_back(testing::parameter(sizes, seed++));
      parameters.push_back(testing::parameter(sizes, seed++, at::kBFloat16));
    }
    parameters.push_back(testing::parameter({33, 9}, seed++, at::kDouble));
    units.push_back(std::make_shared<TestUnit>(parameters, [](const auto&, const at::Tensor& x) { return x; }));
  }
  return std::make_shared<TestNet>(units);
}

std::vector<Piece> pieces_of(shard::Sharded& sharded) {
  std::vector<Piece> pieces;
  for (const shard::Shard& shard : sharded.shards()) {
    pieces.push_back({shard.name, shard.full_size, shard.begin, shard.end, shard.data.detach()});
  }
  return pieces;
}

void on_ranks(const Cut& cut, const std::shared_ptr<TestNet>* models,
              const std::function<void(comm::World&, shard::Sharded&)>& body) {
  run_ranks(cut.ranks, [&](comm::World& world) {
    const comm::Mesh mesh(world.size(), world.rank(), {.data_parallel_replicate = cut.replicas});
    shard::Sharded sharded =
        shard::fully_shard(*models[static_cast<std::size_t>(world.rank())], world.groups(mesh), cut.options);
    body(world, sharded);
  });
}

std::vector<std::shared_ptr<TestNet>> models(int count, uint64_t seed) {
  std::vector<std::shared_ptr<TestNet>> out;
  for (int i = 0; i < count; ++i) out.push_back(hard_model(seed));
  return out;
}

struct Resharding : ::testing::Test {
  std::filesystem::path at(int64_t step) const { return temporary.path() / step_name(step); }

  // Returns the whole model as the ranks have it when they save it.
  Model save(int64_t step, const Cut& cut, uint64_t seed, bool asynchronous = false) {
    Model full;
    on_ranks(cut, models(cut.ranks, seed).data(), [&](comm::World& world, shard::Sharded& sharded) {
      Saver saver(temporary.path(), {.asynchronous = asynchronous}, &world);
      saver.save(step, pieces_of(sharded), {{"step", std::to_string(step)}});
      saver.finish();
      Model mine = sharded.full_state();
      if (world.rank() == 0) full = std::move(mine);
    });
    return full;
  }

  // Loads `from` into a model of other values; saves it again as `to`; returns it whole.
  Model load_and_save(int64_t from, int64_t to, const Cut& cut) {
    Model full;
    on_ranks(cut, models(cut.ranks, 999).data(), [&](comm::World& world, shard::Sharded& sharded) {
      Reader reader(at(from));
      load(reader, pieces_of(sharded), &world);
      Saver(temporary.path(), {}, &world).save(to, pieces_of(sharded), reader.state());
      Model mine = sharded.full_state();
      if (world.rank() == 0) full = std::move(mine);
    });
    return full;
  }

  static void expect_equal(const Model& a, const Model& b) {
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, value] : a) EXPECT_TRUE(bit_equal(value, b.at(name))) << name;
  }

  TemporaryDirectory temporary;
};

TEST_F(Resharding, FourRanksToTwoToOneAndBack) {
  const Model first = save(0, {"4", 4}, 1);
  EXPECT_EQ(first.size(), 26);
  int64_t step = 0;
  for (const int ranks : {2, 1, 4}) {
    expect_equal(load_and_save(step, step + 1, {"", ranks}), first);
    ++step;
    EXPECT_EQ(Reader(at(step)).index().world, ranks);
  }
  EXPECT_EQ(tree(at(3)), tree(at(0))) << "back where it began: the same files";
}

TEST_F(Resharding, ToAnyOtherWayOfCutting) {
  const Model first = save(0, {"3", 3}, 7);
  shard::Options zero1, zero2, single;
  zero1.stage = shard::Stage::kOptimizer;
  zero2.stage = shard::Stage::kGradients;
  single.comm_fusion = false;
  int64_t step = 0;
  for (const Cut& cut : {Cut{"replicas", 4, 2}, Cut{"zero 1", 2, 1, zero1}, Cut{"replicas alone", 3, 3},
                         Cut{"zero 2", 3, 1, zero2}, Cut{"one by one", 4, 1, single}}) {
    SCOPED_TRACE(cut.name);
    expect_equal(load_and_save(step, step + 1, cut), first);
    ++step;
  }
}

TEST_F(Resharding, ReplicasShareTheWritingAndWriteNothingTwice) {
  const Model full = save(0, {"", 4, 2}, 3);
  int64_t expected = 0, written = 0;
  for (const auto& [name, value] : full) expected += static_cast<int64_t>(value.nbytes());
  std::vector<int64_t> of_rank(4, 0);
  const Reader reader(at(0));
  for (const auto& [name, tensor] : reader.index().tensors) {
    for (const IndexPiece& piece : tensor.pieces) {
      const int64_t bytes = (piece.end - piece.begin) * files::size_of(tensor.type);
      of_rank[static_cast<std::size_t>(piece.file)] += bytes;
      written += bytes;
    }
  }
  EXPECT_EQ(written, expected);
  for (const int64_t bytes : of_rank) EXPECT_GT(bytes, expected / 8);
}

TEST_F(Resharding, ReadsOnlyWhatItNeeds) {
  save(0, {"", 4}, 5);
  const Cut cut{"", 4};
  on_ranks(cut, models(4, 6).data(), [&](comm::World& world, shard::Sharded& sharded) {
    Reader reader(at(0));
    const std::vector<Piece> pieces = pieces_of(sharded);
    load(reader, pieces, &world);
    int64_t mine = 0;
    for (const Piece& piece : pieces) mine += static_cast<int64_t>(piece.data.nbytes());
    EXPECT_EQ(reader.bytes_read().count, mine);
    EXPECT_EQ(reader.files_opened(), 1);
  });
}

TEST_F(Resharding, AsynchronousSavingOfRanksGivesTheSameFiles) {
  save(0, {"", 3}, 11);
  const auto synchronous = tree(at(0));
  save(0, {"", 3}, 11, /*asynchronous=*/true);
  EXPECT_EQ(tree(at(0)), synchronous);
  EXPECT_EQ(synchronous.size(), 4);
}

// Moments and step counts of an optimizer that steps pieces, beside the parameters.
TEST_F(Resharding, TrainingGoesOnWithTheSameBits) {
  const auto optimizer_state = [](shard::Sharded& sharded, const std::vector<at::Tensor>& momenta) {
    std::vector<Piece> pieces = pieces_of(sharded);
    const std::size_t count = pieces.size();
    for (std::size_t i = 0; i < count; ++i) {
      Piece piece = pieces[i];
      piece.name = "momentum." + piece.name;
      piece.data = momenta[i];
      pieces.push_back(piece);
    }
    return pieces;
  };
  // All of the gradient from rank 0: the mean over ranks is then the same number, whatever their number.
  const auto step = [](shard::Sharded& sharded, TestNet& net, std::vector<at::Tensor>& momenta, int64_t number,
                       const comm::World& world) {
    sharded.run([&] { return net.loss(number) * (world.rank() == 0 ? world.size() : 0); }).backward();
    const at::NoGradGuard no_grad;
    const auto parameters = sharded.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      momenta[i].mul_(0.9).add_(parameters[i].grad());
      parameters[i].sub_(momenta[i], 0.05);
      parameters[i].mutable_grad().reset();
    }
  };
  const auto net = [] {
    std::vector<std::shared_ptr<TestUnit>> units{testing::dense_unit(1), testing::dense_unit(2)};
    return std::make_shared<TestNet>(units);
  };
  const auto train = [&](int ranks, int64_t from, int64_t to, bool resumed) {
    std::vector<std::shared_ptr<TestNet>> nets;
    for (int i = 0; i < ranks; ++i) nets.push_back(net());
    Model full;
    on_ranks({"", ranks}, nets.data(), [&](comm::World& world, shard::Sharded& sharded) {
      std::vector<at::Tensor> momenta;
      for (const at::Tensor& p : sharded.parameters()) momenta.push_back(at::zeros_like(p.detach()));
      if (resumed) {
        Reader reader(at(from));
        load(reader, optimizer_state(sharded, momenta), &world);
      }
      TestNet& mine = *nets[static_cast<std::size_t>(world.rank())];
      for (int64_t i = from; i < to; ++i) step(sharded, mine, momenta, i, world);
      Saver(temporary.path(), {}, &world).save(to, optimizer_state(sharded, momenta), {});
      Model whole_model = sharded.full_state();
      if (world.rank() == 0) full = std::move(whole_model);
    });
    return full;
  };
  const Model uninterrupted = train(4, 0, 8, false);
  train(4, 0, 2, false);
  train(2, 2, 4, true);
  train(1, 4, 6, true);
  expect_equal(train(4, 6, 8, true), uninterrupted);
}

}  // namespace
}  // namespace neap::checkpoint
