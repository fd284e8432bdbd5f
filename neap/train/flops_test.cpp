// torch-free
#include "neap/train/flops.h"

#include <gtest/gtest.h>

#include "testing/llama_config.h"

namespace neap::train {
namespace {

TEST(Flops, CountsEveryWeightThatMultipliesATokenAndAttention) {
  models::LlamaConfig config = testing::small_llama(/*vocabulary=*/97);
  // Per layer q and o 32·32, k and v 32·16, three of 32·48 in the mlp; the head 32·97.
  const double weights = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 97;
  EXPECT_EQ(flops_per_token(config, 10), 6 * weights + 12 * 3 * 32 * 10);
  // The head multiplies, whether or not it has a weight of its own.
  config.tie_word_embeddings = true;
  EXPECT_EQ(flops_per_token(config, 10), 6 * weights + 12 * 3 * 32 * 10);
}

}  // namespace
}  // namespace neap::train
