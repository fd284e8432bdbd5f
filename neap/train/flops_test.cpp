// torch-free
#include "neap/train/flops.h"

#include <gtest/gtest.h>

#include "testing/deepseek_config.h"
#include "testing/llama_config.h"

namespace neap::train {
namespace {

TEST(Flops, CountsEveryWeightThatMultipliesATokenAndAttention) {
  models::ModelConfig config = testing::small_llama(/*vocabulary=*/97);
  // Per layer q and o 32·32, k and v 32·16, three of 32·48 in the mlp; the head 32·97.
  const double weights = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 97;
  EXPECT_EQ(flops_per_token(config, 10), 6 * weights + 12 * 3 * 32 * 10);
  EXPECT_EQ(flops_per_token(config, 10, /*frozen=*/true), 4 * weights + 12 * 3 * 32 * 10);
  // The head multiplies, whether or not it has a weight of its own.
  config.tie_word_embeddings = true;
  EXPECT_EQ(flops_per_token(config, 10), 6 * weights + 12 * 3 * 32 * 10);
}

TEST(Flops, CountOfExpertsThoseThatATokenIsRoutedTo) {
  // Attention 24·(32 + 4·20) for q, 32·(16 + 8) + 16·4·(12 + 10) for k and v, 4·10·32 behind; a dense mlp of 48, and
  // twice a router to 8 experts, three of them and a shared one of 20.
  const double attention = 24 * (32 + 4 * 20) + 32 * (16 + 8) + 16 * 4 * (12 + 10) + 4 * 10 * 32;
  const double weights = 3 * attention + 3 * 32 * 48 + 2 * (32 * 8 + 3 * (3 + 1) * 32 * 20) + 32 * 97;
  EXPECT_EQ(flops_per_token(testing::small_deepseek(/*vocabulary=*/97), 10),
            6 * weights + 6 * 3 * (4 * 20 + 4 * 10) * 10);
  // One that predicts further tokens: another such layer with experts, a projection of 64 to 32, the head again.
  const double further = attention + 32 * 8 + 3 * (3 + 1) * 32 * 20 + 64 * 32 + 32 * 97;
  EXPECT_EQ(flops_per_token(testing::small_deepseek(/*vocabulary=*/97), 10, /*frozen=*/false, /*further=*/1),
            6 * (weights + further) + 6 * 4 * (4 * 20 + 4 * 10) * 10);
}

}  // namespace
}  // namespace neap::train
