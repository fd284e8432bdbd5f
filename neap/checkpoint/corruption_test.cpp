// Checkpoints that are damaged, incomplete, or of something else: an error that names the file, on every rank.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/checkpoint/saver.h"
#include "neap/checkpoint/test_support.h"
#include "neap/comm/agreement.h"
#include "neap/comm/world.h"
#include "testing/error_of.h"
#include "testing/matchers.h"
#include "testing/nested_json.h"
#include "testing/ranks.h"

namespace neap::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

// Rank r of two holds the half r of "a", and rank 0 "b".
std::vector<Piece> halves_of(int rank, const at::Tensor& half) {
  std::vector<Piece> pieces = {{"a", {2, 50}, rank * 50, rank * 50 + 50, half}};
  if (rank == 0) pieces.push_back(whole("b", at::full({3}, 7, at::kByte)));
  return pieces;
}

struct Damage : ::testing::Test {
  Damage() {
    testing::run_ranks(2, [&](comm::World& world) {
      Saver saver(temporary.path(), {}, &world);
      saver.save(1, halves_of(world.rank(), at::arange(50, at::kFloat)), {});
      saver.save(2, halves_of(world.rank(), at::arange(1, 51, at::kFloat)), {});
    });
  }
  fs::path dir() const { return temporary.path() / step_name(2); }
  fs::path file(int rank) const { return dir() / file_of_rank(rank); }

  // Of `neap checkpoint verify`, and of two ranks that load; both name `path`.
  void expect_error(const fs::path& path, const std::string& what) {
    EXPECT_THAT(error_of([&] { Reader(dir()).verify(); }), AllOf(HasSubstr(path.string()), HasSubstr(what)));
    testing::run_ranks(2, [&](comm::World& world) {
      const std::string error = error_of([&] {
        std::unique_ptr<Reader> reader;
        comm::together(&world, "open", [&] { reader = std::make_unique<Reader>(dir()); });
        load(*reader, halves_of(world.rank(), at::zeros({50})), &world, [](const auto& name) { return name == "b"; });
      });
      EXPECT_THAT(error, AllOf(HasSubstr(path.string()), HasSubstr(what)));
    });
  }

  TemporaryDirectory temporary;
};

TEST_F(Damage, NoneIsNoError) {
  Reader reader(dir());
  reader.verify();
  EXPECT_TRUE(testing::bit_equal(reader.tensor("a")[1], at::arange(1, 51, at::kFloat)));
}

TEST_F(Damage, AChangedByteInAnyPartOfARankFile) {
  const std::string good = read_file(file(1));
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 4);
    write_file(file(1), bad);
    const std::string error = error_of([&] { Reader(dir()).verify(); });
    const bool in_metadata = error == testing::kNoError;
    if (in_metadata) {
      // What says the same as the index, for people; nothing is read from it.
      EXPECT_LT(i, good.find("data_offsets"));
    } else {
      EXPECT_THAT(error, HasSubstr(file(1).string())) << i;
    }
  }
  std::string bad = good;
  bad.back() = static_cast<char>(bad.back() ^ 1);
  write_file(file(1), bad);
  expect_error(file(1), "is damaged: the elements 50 to 100 of 'a' have the checksum");
}

TEST_F(Damage, ATruncatedRankFile) {
  const auto size = fs::file_size(file(1));
  for (const auto kept : {size - 1, size / 2, std::uintmax_t{4}, std::uintmax_t{0}}) {
    fs::resize_file(file(1), kept);
    expect_error(file(1), "it is truncated");
  }
}

TEST_F(Damage, ARankFileThatIsMissing) {
  fs::remove(file(1));
  expect_error(file(1), "is missing: No such file");
}

TEST_F(Damage, ARankFileOfAnotherCheckpoint) {
  fs::copy_file(temporary.path() / step_name(1) / file_of_rank(1), file(1), fs::copy_options::overwrite_existing);
  expect_error(file(1), "is damaged");
}

TEST_F(Damage, ARankFileOfAnotherRank) {
  fs::copy_file(file(0), file(1), fs::copy_options::overwrite_existing);
  expect_error(file(1), "");
}

TEST_F(Damage, SomethingElseInPlaceOfARankFile) {
  write_file(file(1), std::string(fs::file_size(file(1)), 'x'));
  expect_error(file(1), "is not a safetensors file");
}

TEST_F(Damage, OfTheIndex) {
  const std::string good = read_file(dir() / kIndexName);
  std::string bad = good;
  bad[good.find("checksum") + 13] ^= 1;
  write_file(dir() / kIndexName, bad);
  expect_error(dir() / kIndexName, "is damaged: it does not have the checksum");
  write_file(dir() / kIndexName, good.substr(0, good.size() / 2));
  expect_error(dir() / kIndexName, "truncated, damaged");
  write_file(dir() / kIndexName, R"({"format": )" + testing::nested_json(1'000'000) + "}");
  expect_error(dir() / kIndexName, "truncated, damaged");
  fs::remove(dir() / kIndexName);
  expect_error(dir() / kIndexName, "no complete checkpoint");
}

TEST_F(Damage, OfAPieceThatNobodyReadsStopsNobodyButTheCheck) {
  std::string bad = read_file(file(0));
  bad.back() = static_cast<char>(bad.back() ^ 1);  // of "b"
  write_file(file(0), bad);
  EXPECT_THAT(error_of([&] { Reader(dir()).verify(); }), HasSubstr("of 'b'"));
  Reader reader(dir());
  EXPECT_TRUE(testing::bit_equal(reader.tensor("a")[0], at::arange(1, 51, at::kFloat)));
}

TEST_F(Damage, AnotherModel) {
  const at::Tensor target = at::zeros({50});
  testing::run_ranks(2, [&](comm::World& world) {
    std::vector<Piece> pieces = {{"a", {4, 25}, 0, 50, at::zeros({50})}, whole("c", at::zeros({3}))};
    if (world.rank() == 1) pieces = halves_of(0, target);  // this rank alone would be content
    Reader reader(dir());
    EXPECT_THAT(error_of([&] { load(reader, pieces, &world); }),
                AllOf(HasSubstr((dir() / kIndexName).string()), HasSubstr("misshapen: a is [2, 50], expected [4, 25]"),
                      HasSubstr("missing: c"), HasSubstr("unexpected: b"), Not(HasSubstr("missing: a"))));
  });
  Reader reader(dir());
  EXPECT_THAT(error_of([&] { reader.check({whole("b", at::zeros({3}))}); }),
              AllOf(HasSubstr("of another dtype: b is U8, expected F32"), HasSubstr("unexpected: a")));
}

}  // namespace
}  // namespace neap::checkpoint
