#include "neap/train/batch_reader.h"

#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "testing/error_of.h"
#include "testing/sim_fixture.h"

namespace neap::train {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

// Sequences of four letters over a text of bytes 0 … 200.
class BatchReaderTest : public testing::SimTest {
 protected:
  void SetUp() override {
    SimTest::SetUp();
    std::string pattern = (std::filesystem::temp_directory_path() / "neap-batches-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = std::filesystem::path(pattern) / "text";
    std::string bytes;
    for (int i = 0; i <= 200; ++i) bytes += static_cast<char>(i);
    std::ofstream(path_, std::ios::binary) << bytes;
    file_.emplace(TokenFile::open(path_));
    sequences_.emplace(*file_, Sequences::Options{.length = 4, .shuffle = false, .seed = 0});
  }
  void TearDown() override {
    std::filesystem::remove_all(path_.parent_path());
    SimTest::TearDown();
  }

  BatchReader reader(int64_t batch, int64_t stride, c10::Device device = c10::kCPU) const {
    return {*sequences_, {.batch = batch, .sequence = 4, .stride = stride, .ahead = 2, .device = device}};
  }
  static int64_t first(const Batch& batch, int64_t row) { return batch.inputs[row][0].item<int64_t>(); }

  std::filesystem::path path_;
  std::optional<TokenFile> file_;
  std::optional<Sequences> sequences_;
};

TEST_F(BatchReaderTest, ReadsTheRowsOfAPositionWithTheirLabels) {
  BatchReader batches = reader(2, 6);
  for (const int64_t position : {0, 6, 12}) {
    const Batch batch = batches.read(position);
    ASSERT_EQ(batch.inputs.sizes(), (at::IntArrayRef{2, 4}));
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_EQ(first(batch, row), 4 * (position + row));
      EXPECT_TRUE(batch.labels[row].equal(batch.inputs[row] + 1));
    }
  }
}

TEST_F(BatchReaderTest, TheFirstBatchOfAStepKnowsHowManyLabelsOfTheStepCount) {
  // Text byte 9 ends a document: sequence 2, the second of the first step of this rank of two.
  const Sequences ended(*file_, {.length = 4, .shuffle = false, .seed = 0, .end_token = 9});
  BatchReader batches(ended, {.batch = 1, .sequence = 4, .stride = 2, .step = 3});
  const auto learned = [&](int64_t position) { return batches.read(position).learned; };
  EXPECT_EQ(learned(0), 11);
  EXPECT_EQ(batches.read(2).labels.eq(kIgnoredLabel).sum().item<int64_t>(), 1);
  batches.read(4);
  EXPECT_EQ(learned(6), 12);
  EXPECT_EQ(learned(0), 11);  // begun anew
}

TEST_F(BatchReaderTest, AnyOtherPositionIsReadJustAsWell) {
  BatchReader batches = reader(1, 1);
  for (const int64_t position : {3, 4, 5, 40, 41, 0, 0, 7}) {
    EXPECT_EQ(first(batches.read(position), 0), 4 * position) << position;
  }
}

TEST_F(BatchReaderTest, BatchesForADeviceAreInPinnedMemoryAndMayBeDroppedWhileTheyAreCopied) {
  BatchReader batches = reader(8, 8, testing::sim());
  std::vector<at::Tensor> copies;
  {
    const testing::HeldCopies held(0, sim::Link::kHostToDevice);
    for (int64_t step = 0; step < 5; ++step) {
      const Batch batch = batches.read(8 * step);
      EXPECT_TRUE(batch.inputs.is_pinned());
      copies.push_back(batch.inputs.to(testing::sim(), /*non_blocking=*/true));
    }
  }
  for (int64_t step = 0; step < 5; ++step) {
    const at::Tensor copy = copies[static_cast<size_t>(step)].cpu();
    for (int64_t row = 0; row < 8; ++row) EXPECT_EQ(copy[row][0].item<int64_t>(), 4 * (8 * step + row));
  }
}

TEST_F(BatchReaderTest, AFileThatIsCutShortMeanwhileEndsInTheReadersError) {
  BatchReader batches = reader(1, 1);
  batches.read(0);
  std::filesystem::resize_file(path_, 50);
  const auto read_on = [&] {
    for (int64_t position = 1; position < 10; ++position) batches.read(position);
  };
  EXPECT_THAT(error_of(read_on), HasSubstr("text: the file had 201 bytes when it was opened and has 50 now"));
}

}  // namespace
}  // namespace neap::train
