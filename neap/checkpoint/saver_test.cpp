#include "neap/checkpoint/saver.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "neap/base/log.h"
#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/checkpoint/test_support.h"
#include "neap/comm/world.h"
#include "testing/error_of.h"
#include "testing/matchers.h"
#include "testing/ranks.h"

namespace neap::checkpoint {
namespace {

using ::testing::AllOf;
using testing::bit_equal;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

struct Saving : ::testing::Test {
  std::filesystem::path dir() const { return temporary.path() / "checkpoints"; }
  std::filesystem::path at(int64_t step) const { return dir() / step_name(step); }
  std::vector<Piece> pieces() const { return {whole("a", a), whole("b", b)}; }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(dir())) out.push_back(entry.path().filename());
    std::ranges::sort(out);
    return out;
  }

  TemporaryDirectory temporary;
  at::Tensor a = at::arange(1000, at::kFloat).view({10, 100});
  at::Tensor b = at::full({3}, 7, at::kByte);
};

TEST_F(Saving, GivesBackWhatWasSaved) {
  Saver(dir(), {}).save(20, pieces(), {{"step", "20"}, {"text", "ä\n"}});
  EXPECT_THAT(names(), ElementsAre("step-00000020"));
  Reader reader(at(20));
  EXPECT_EQ(reader.state("text"), "ä\n");
  EXPECT_THAT(error_of([&] { (void)reader.state("seed"); }), HasSubstr("expected 'seed' in the state"));
  EXPECT_TRUE(bit_equal(reader.tensor("a"), a));
  EXPECT_TRUE(bit_equal(reader.tensor("b"), b));
  EXPECT_THAT(error_of([&] { reader.tensor("c"); }), HasSubstr("expected a tensor 'c'"));
  reader.verify();
}

TEST_F(Saving, AsynchronouslyKeepsTheValuesOfTheCallAndWritesTheSameBytes) {
  Saver(dir(), {}).save(1, pieces(), {});
  const auto expected = tree(at(1));
  Saver saver(dir(), {.asynchronous = true});
  saver.save(1, pieces(), {});
  a.zero_();
  saver.save(2, pieces(), {});  // completes the one before
  EXPECT_EQ(tree(at(1)), expected);
  EXPECT_TRUE(saver.in_flight());
  EXPECT_FALSE(std::filesystem::exists(at(2)));
  while (saver.in_flight()) saver.poll();
  EXPECT_TRUE(bit_equal(Reader(at(2)).tensor("a"), a));
}

TEST_F(Saving, AsynchronouslyTakesItsMemoryOfAPoolThatStopsGrowing) {
  // More than a slab of the pool in all, one larger than a slab, many small ones, and one without elements.
  std::vector<at::Tensor> tensors = {at::zeros({0}), at::arange(20'000'000, at::kFloat),
                                     at::arange(7'000'000, at::kFloat)};
  for (int i = 1; i < 40; ++i) tensors.push_back(at::full({i * 1000}, i, at::kFloat));
  const auto all = [&] {
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < tensors.size(); ++i) pieces.push_back(whole(std::to_string(i), tensors[i]));
    return pieces;
  };
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  Saver saver(dir(), {.keep_last = 1, .asynchronous = true});
  EXPECT_EQ(saver.host_counters().acquires, 0);
  saver.save(1, all(), {});
  const memory::PoolCounters first = saver.host_counters();
  EXPECT_EQ(first.acquires, 41);
  EXPECT_GE(first.locked, Bytes(bytes));
  EXPECT_LE(first.locked, Bytes(bytes + (int64_t{64} << 20)));
  for (int64_t step = 2; step < 6; ++step) {
    tensors[1].add_(1);
    saver.save(step, all(), {});
    const memory::PoolCounters now = saver.host_counters();
    EXPECT_EQ(now.slab_allocations, first.slab_allocations) << step;
    EXPECT_EQ(now.acquires, 41 * step);
    EXPECT_EQ(now.evictions, 0);
  }
  saver.finish();
  EXPECT_EQ(saver.host_counters().in_use, Bytes(0));
  EXPECT_EQ(saver.host_counters().locked_peak, first.locked);
  EXPECT_TRUE(bit_equal(Reader(at(5)).tensor("1"), tensors[1]));
  Saver(dir(), {.keep_last = 1}).save(6, all(), {});  // the run waits, and the files are the same
  for (const std::string name : {"0", "1", "2", "17", "41"})
    EXPECT_TRUE(bit_equal(Reader(at(6)).tensor(name), tensors[std::stoul(name)])) << name;
}

TEST_F(Saving, WithoutMemoryForACopyTheRunWaitsAndSaysSoOnce) {
  std::string warnings;
  const LogSink former = set_log_sink([&](LogLevel, const std::string& text) { warnings += text; });
  {
    Saver saver(dir(), {.asynchronous = true, .host_limit = Bytes(4096)});
    saver.save(1, pieces(), {});
    const std::string once = warnings;
    EXPECT_THAT(once, AllOf(HasSubstr("the run waits"), HasSubstr("of 4.00 KiB")));
    a.zero_();  // of what is written already nothing changes
    saver.save(2, pieces(), {});
    saver.finish();
    EXPECT_EQ(warnings, once);
    EXPECT_LE(saver.host_counters().locked, Bytes(4096));
  }
  set_log_sink(former);
  EXPECT_TRUE(bit_equal(Reader(at(1)).tensor("a"), at::arange(1000, at::kFloat).view({10, 100})));
}

TEST_F(Saving, KeepsTheLastFew) {
  Saver saver(dir(), {.keep_last = 2, .asynchronous = true});
  for (const int64_t step : {1, 2, 3, 4}) saver.save(step, pieces(), {});
  saver.finish();
  EXPECT_THAT(names(), ElementsAre("step-00000003", "step-00000004"));
  EXPECT_THAT(error_of([&] { Saver(dir(), {.keep_last = -1}); }), HasSubstr("found -1"));
}

TEST_F(Saving, ReplacesACheckpointOfTheSameStep) {
  Saver saver(dir(), {});
  saver.save(1, pieces(), {});
  write_file(at(1) / "stray", "of before");
  a.add_(1);
  saver.save(1, pieces(), {});
  EXPECT_THAT(names(), ElementsAre("step-00000001"));
  EXPECT_FALSE(std::filesystem::exists(at(1) / "stray"));
  EXPECT_TRUE(bit_equal(Reader(at(1)).tensor("a"), a));
}

TEST_F(Saving, AnErrorOfTheThreadSurfacesAtTheNextPollAndTheNextSaveWorks) {
  // Calls: make_directory, the temporary one's remove and make_directory, create, …
  FailingFileSystem system(4);
  Saver saver(dir(), {.asynchronous = true, .system = &system});
  saver.save(1, pieces(), {});
  const std::string error = error_of([&] {
    while (saver.in_flight()) saver.poll();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("could not be saved; those before it are untouched"), HasSubstr("injected: write"),
                           HasSubstr("rank-00000.safetensors")));
  EXPECT_FALSE(saver.in_flight());
  EXPECT_TRUE(names().empty());
  saver.save(2, pieces(), {});
  saver.finish();
  EXPECT_THAT(names(), ElementsAre("step-00000002"));
}

TEST_F(Saving, ASaverThatGoesLeavesNoHalf) {
  {
    Saver saver(dir(), {.asynchronous = true});
    saver.save(1, pieces(), {});
  }
  EXPECT_TRUE(names().empty());
}

TEST_F(Saving, WhatCannotBeSavedIsSaidBeforeAnythingIsWritten) {
  Saver saver(dir(), {});
  EXPECT_THAT(error_of([&] { saver.save(1, {whole("a", a), whole("a", b)}, {}); }), HasSubstr("one piece of 'a'"));
  EXPECT_THAT(error_of([&] {
                saver.save(1, {{"a", {10, 100}, 0, 1000, a.t().reshape({-1}).slice(0, 0, 999)}}, {});
              }),
              HasSubstr("the elements 0 to 1000"));
  EXPECT_THAT(error_of([&] {
                saver.save(1, {{"a", {10, 100}, 0, 999, a.view(-1).narrow(0, 0, 999)}}, {});
              }),
              HasSubstr("cover 999 of its 1000 elements"));
  EXPECT_THAT(error_of([&] { saver.save(1, {whole("a", at::zeros({2}, at::kComplexFloat))}, {}); }),
              HasSubstr("cannot hold"));
  EXPECT_FALSE(std::filesystem::exists(dir()));
}

TEST_F(Saving, AnErrorOfOneRankIsAnErrorOfAll) {
  for (const bool asynchronous : {false, true}) {
    testing::run_ranks(3, [&](comm::World& world) {
      FailingFileSystem system(world.rank() == 1 ? 1 : FailingFileSystem::kNever);
      Saver saver(dir(), {.asynchronous = asynchronous, .system = &system}, &world);
      const std::string error = error_of([&] {
        saver.save(1, pieces(), {});
        while (saver.in_flight()) saver.poll();
      });
      EXPECT_THAT(error, HasSubstr("rank-00001.safetensors"));
      if (world.rank() != 1) {
        EXPECT_THAT(error, HasSubstr("so says rank 1"));
      }
      world.all().barrier("test").wait();
      saver.save(2, pieces(), {});
      saver.finish();
    });
    EXPECT_THAT(names(), ElementsAre("step-00000002"));
  }
}

TEST_F(Saving, RanksThatDisagreeAboutATensorAllSaySo) {
  testing::run_ranks(2, [&](comm::World& world) {
    const at::Tensor mine = at::zeros({world.rank() + 1});
    EXPECT_THAT(error_of([&] { Saver(dir(), {}, &world).save(1, {whole("x", mine)}, {}); }),
                HasSubstr("rank 1 has 'x' in another shape"));
  });
}

TEST_F(Saving, RanksHaveTensorsOfTheirOwnBesideSharedOnes) {
  testing::run_ranks(3, [&](comm::World& world) {
    const std::string own = "rank." + std::to_string(world.rank());
    Saver(dir(), {}, &world).save(1, {whole("a", a), whole(own, at::full({4}, world.rank()))}, {});
  });
  Reader reader(at(1));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(bit_equal(reader.tensor("rank." + std::to_string(rank)), at::full({4}, rank)));
  }
  EXPECT_EQ(reader.index().tensors.at("a").pieces.size(), 1);
}

}  // namespace
}  // namespace neap::checkpoint
