// Documents that share a row compute what each of them computes alone.
#include "neap/models/documents.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "neap/models/causal_lm.h"
#include "testing/deepseek_config.h"
#include "testing/llama_config.h"

namespace neap::models {
namespace {

constexpr int64_t kEnd = 7;

at::Tensor row(const std::vector<int64_t>& tokens) { return at::tensor(tokens, at::kLong).unsqueeze(0); }

TEST(Documents, HavePlacesOfTheirOwnAndSeeWhatIsBeforeInThem) {
  const at::Tensor ids = at::cat({row({1, 2, kEnd, 4, kEnd, kEnd, 3}), row({kEnd, 1, 2, 3, 4, 5, kEnd})});
  const Documents found = find_documents(ids, kEnd, at::kFloat);
  EXPECT_TRUE(at::equal(found.positions, at::cat({row({0, 1, 2, 0, 1, 0, 0}), row({0, 0, 1, 2, 3, 4, 5})})));
  const std::vector<int64_t> documents = {0, 0, 0, 1, 1, 2, 3};
  for (int64_t query = 0; query < 7; ++query) {
    for (int64_t key = 0; key < 7; ++key) {
      const bool sees = key <= query && documents[static_cast<size_t>(key)] == documents[static_cast<size_t>(query)];
      EXPECT_EQ(found.mask[0][0][query][key].item<double>(), sees ? 0 : -std::numeric_limits<double>::infinity())
          << query << ", " << key;
    }
  }
  EXPECT_EQ(find_documents(row({1}), kEnd, at::kFloat).positions.item<int64_t>(), 0);
}

// Of the tokens' own documents, for each token: [documents of `lengths`, one after the other].
std::vector<std::pair<at::Tensor, at::Tensor>> documents_of(const at::Tensor& tokens,
                                                            const std::vector<int64_t>& lengths) {
  std::vector<std::pair<at::Tensor, at::Tensor>> documents;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    at::Tensor labels = tokens.narrow(1, begin + 1, length).clone();
    labels.select(1, length - 1).fill_(-100);
    documents.emplace_back(tokens.narrow(1, begin, length), labels);
    begin += length;
  }
  return documents;
}

std::vector<ModelConfig> kinds_of_attention() {
  ModelConfig further = testing::small_deepseek(61);
  further.mtp_layers = 2;
  further.with_mtp = true;
  return {testing::small_llama(61), further};
}

TEST(Documents, ThatShareARowHaveTheLossAndTheGradientsOfEachAlone) {
  const std::vector<int64_t> lengths = {5, 1, 8, 3};
  for (const ModelConfig& config : kinds_of_attention()) {
    at::Tensor tokens = at::randint(8, 61, {1, 18}, at::kLong);
    for (int64_t end : {4, 5, 13, 16}) tokens.select(1, end).fill_(kEnd);
    const auto together = make_model(config, at::kDouble, 2), alone = make_model(config, at::kDouble, 2);
    together->separate_documents(kEnd);
    const LossOptions options{.divisor = 1};
    const auto objective = [&](CausalLM& model, const at::Tensor& ids, const at::Tensor& labels) {
      if (config.built_mtp_layers() == 0) return model.loss(ids, labels, options);
      const CausalLM::Losses losses = model.losses(ids, labels, options);
      return losses.loss + losses.further;
    };
    const at::Tensor ids = tokens.narrow(1, 0, 17);
    const at::Tensor labels = tokens.narrow(1, 1, 17).masked_fill(ids.eq(kEnd), -100);
    const at::Tensor found = objective(*together, ids, labels);
    found.backward();
    at::Tensor expected = at::zeros({}, at::kDouble);
    for (const auto& [own_ids, own_labels] : documents_of(tokens, lengths)) {
      const at::Tensor part = objective(*alone, own_ids, own_labels);
      part.backward();
      expected += part.detach();
    }
    EXPECT_TRUE(at::allclose(found, expected, 1e-12));
    const auto gradients = alone->named_parameters();
    for (const auto& item : together->named_parameters()) {
      EXPECT_TRUE(at::allclose(item.value().grad(), gradients[item.key()].grad(), 1e-9, 1e-12)) << item.key();
    }
    EXPECT_FALSE(at::allclose(alone->loss(ids, labels, options), together->loss(ids, labels, options)));
  }
}

}  // namespace
}  // namespace neap::models
