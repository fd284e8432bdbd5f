#include "neap/train/evaluation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/comm/world.h"
#include "neap/shard/fully_shard.h"

namespace neap::train {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Evaluation::Evaluation(Parts parts, const TrainSection& train)
    : parts_(std::move(parts)),
      train_(train),
      ranks_(parts_.world == nullptr ? 1 : parts_.world->size()),
      rank_(parts_.world == nullptr ? 0 : parts_.world->rank()),
      sequences_(parts_.sequences.per_epoch()) {
  if (train.eval_batches > 0) sequences_ = std::min(sequences_, train.eval_batches * train.batch);
  labels_ = parts_.sequences.learned(0, sequences_);
  NEAP_CHECK(
      labels_ > 0, "[data.eval] expected labels that count in its first ", sequences_,
      " sequences; found none, since each of them follows the end of a document (data.end_token); other data, or "
      "more of it with train.eval_batches: 0, is needed");
}

// Rows beyond the end count nothing: every rank runs the same number of batches, since running one is collective.
at::Tensor Evaluation::batch_loss(int64_t batch) {
  const at::Tensor inputs = at::zeros({train_.batch, train_.sequence}, at::kLong);
  const at::Tensor labels = at::full_like(inputs, kIgnoredLabel);
  const int64_t first = batch * train_.batch;
  const int64_t rows = std::clamp<int64_t>(sequences_ - first, 0, train_.batch);
  const auto tokens = static_cast<size_t>(rows * train_.sequence);
  parts_.sequences.read(first, {inputs.data_ptr<int64_t>(), tokens}, {labels.data_ptr<int64_t>(), tokens});
  const c10::Device device = parts_.device.c10_device();
  return parts_.loss(inputs.to(device), labels.to(device), /*divisor=*/1).loss;
}

double Evaluation::loss() {
  const at::NoGradGuard no_grad;
  const ScopeExit train_again([&] {
    if (parts_.model != nullptr) parts_.model->train();
  });
  if (parts_.model != nullptr) parts_.model->eval();
  const int64_t batches = ceil_div(sequences_, train_.batch);
  const int64_t rounds = ceil_div(batches, ranks_);
  const at::Tensor all = at::empty({ranks_, rounds}, at::kFloat);
  const at::Tensor mine = all.select(0, rank_);
  for (int64_t round = 0; round < rounds; ++round) mine.select(0, round).copy_(batch_loss(round * ranks_ + rank_));
  // A forward without a backward leaves full parameters behind.
  if (parts_.sharded != nullptr) parts_.sharded->reshard();
  if (parts_.world != nullptr) parts_.world->all().all_gather(all, "evaluation").wait();
  const auto sums = all.accessor<float, 2>();
  double total = 0;
  for (int64_t batch = 0; batch < batches; ++batch) total += sums[batch % ranks_][batch / ranks_];
  return total / static_cast<double>(labels_);
}

}  // namespace neap::train
