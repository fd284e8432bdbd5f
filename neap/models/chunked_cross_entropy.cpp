#include "neap/models/chunked_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "neap/models/internal/hand_written.h"

namespace neap::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunkBytes = int64_t{32} << 20;
constexpr int64_t kMinChunkTokens = 32;  // below this the matrix products lose more than the memory is worth

int64_t chunk_size(int64_t tokens, int64_t vocabulary, int64_t asked) {
  if (asked > 0) return asked;
  const int64_t fitting = std::max(kMinChunkTokens, kChunkBytes / (static_cast<int64_t>(sizeof(float)) * vocabulary));
  const int64_t chunks = std::max<int64_t>(1, (tokens + fitting - 1) / fitting);
  return (tokens + chunks - 1) / chunks;  // equal chunks: a small last one would be slow
}

struct Wanted {
  bool hidden;
  bool weight;
  bool any() const { return hidden || weight; }
};

// The state of one forward: totals that grow chunk by chunk.
class Accumulator {
 public:
  Accumulator(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, const LossOptions& options,
              Wanted wanted)
      : hidden_(hidden),
        weight_(weight),
        options_(options),
        wanted_(wanted),
        wide_(internal::wide_type(hidden.scalar_type())),
        valid_(labels.ne(options.ignore_index)) {
    labels_ = labels.masked_fill(valid_.logical_not(), 0).unsqueeze_(-1);
    // A tensor, not a number: counting on the host would wait for the device.
    const at::Tensor divisor = options.divisor ? at::scalar_tensor(*options.divisor, valid_.options().dtype(wide_))
                                               : valid_.sum(wide_).clamp_min_(1);
    share_ = valid_.to(wide_).div_(divisor).unsqueeze_(-1);
    loss_ = at::zeros({}, share_.options());
    if (wanted_.hidden) grad_hidden = at::empty_like(hidden);
  }

  void add_chunk(int64_t begin, int64_t end) {
    const at::Tensor hidden = hidden_.slice(0, begin, end);
    const at::Tensor labels = labels_.slice(0, begin, end);
    const at::Tensor share = share_.slice(0, begin, end);
    at::Tensor logits = at::mm(hidden, weight_.t());
    const at::Tensor target_logit = options_.z_loss == 0 ? at::Tensor() : logits.gather(1, labels).to(wide_);
    at::Tensor log_probability = at::log_softmax(logits, 1, wide_);
    logits.reset();
    const at::Tensor target = log_probability.gather(1, labels);
    at::Tensor token_loss = target.neg();
    at::Tensor log_normaliser;
    if (options_.z_loss != 0) {
      log_normaliser = target_logit - target;
      token_loss.addcmul_(log_normaliser, log_normaliser, options_.z_loss);
    }
    // The fill besides the product: 0 * inf of an ignored token would be NaN.
    loss_.add_(token_loss.mul_(share).masked_fill_(valid_.slice(0, begin, end).logical_not().unsqueeze_(-1), 0).sum());
    // Moved, so that the wide one is gone as soon as there is a narrow one.
    if (wanted_.any())
      add_gradients(hidden, labels, share, std::move(log_probability.exp_()), log_normaliser, begin, end);
  }

  at::Tensor loss() const { return loss_; }

  // Of no tokens: zeros.
  void finish() {
    if (wanted_.weight && !grad_weight.defined()) grad_weight = at::zeros_like(weight_);
  }

  at::Tensor grad_hidden;
  at::Tensor grad_weight;

 private:
  // d loss / d logits = share * (probability * (1 + 2 z lse) - onehot). The share of each token is applied to the small
  // operand of each product, which saves a pass over [chunk, vocabulary]. In its wide type: narrow, it would make all
  // gradients larger or smaller by the same up to 0.4 %.
  void add_gradients(const at::Tensor& hidden, const at::Tensor& labels, const at::Tensor& share, at::Tensor delta,
                     const at::Tensor& log_normaliser, int64_t begin, int64_t end) {
    if (options_.z_loss != 0) delta.mul_(log_normaliser.mul(2 * options_.z_loss).add_(1));
    delta.scatter_add_(1, labels,
                       minus_one_.defined() ? minus_one_.slice(0, 0, end - begin) : make_minus_one(end - begin));
    delta = delta.to(hidden.scalar_type());
    if (wanted_.hidden) {
      at::Tensor out = grad_hidden.slice(0, begin, end);
      at::mm_out(out, delta, weight_).mul_(share);
    }
    if (!wanted_.weight) return;
    add_to_grad_weight(delta, hidden.mul(share).to(hidden.scalar_type()), end == hidden_.size(0));
  }

  // Low precision is summed over chunks in float32; one chunk alone needs no sum. The first product comes when its
  // logits are gone: beside them it would make the peak.
  void add_to_grad_weight(const at::Tensor& delta, const at::Tensor& weighted, bool last) {
    if (!grad_weight.defined()) {
      const at::Tensor product = at::mm(delta.t(), weighted);
      grad_weight = last ? product : product.to(wide_);
    } else if (delta.scalar_type() == wide_) {
      grad_weight.addmm_(delta.t(), weighted);
    } else {
      add_widened(grad_weight, at::mm(delta.t(), weighted));
    }
  }

  // On the host, adding a narrow tensor to a wide one would first widen all of it.
  static void add_widened(const at::Tensor& sum, const at::Tensor& narrow) {
    constexpr int64_t kRows = 1024;
    for (int64_t begin = 0; begin < sum.size(0); begin += kRows) {
      const int64_t end = std::min(begin + kRows, sum.size(0));
      sum.slice(0, begin, end).add_(narrow.slice(0, begin, end));
    }
  }

  at::Tensor make_minus_one(int64_t rows) { return minus_one_ = share_.new_full({rows, 1}, -1); }

  const at::Tensor& hidden_;
  const at::Tensor& weight_;
  const LossOptions& options_;
  Wanted wanted_;
  at::ScalarType wide_;
  at::Tensor valid_;      // [tokens]
  at::Tensor labels_;     // [tokens, 1], ignored ones replaced by 0
  at::Tensor share_;      // [tokens, 1]: 1 / divisor, 0 for ignored tokens
  at::Tensor loss_;       // scalar
  at::Tensor minus_one_;  // [chunk, 1]
};

struct ChunkedCrossEntropyFunction : torch::autograd::Function<ChunkedCrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& labels, const LossOptions* options, Wanted wanted) {
    Accumulator accumulator(hidden, weight, labels, *options, wanted);
    const int64_t tokens = hidden.size(0);
    const int64_t chunk = chunk_size(tokens, weight.size(0), options->chunk_tokens);
    for (int64_t begin = 0; begin < tokens; begin += chunk)
      accumulator.add_chunk(begin, std::min(begin + chunk, tokens));
    accumulator.finish();
    at::Tensor grad_weight = accumulator.grad_weight;
    if (grad_weight.defined()) grad_weight = grad_weight.to(weight.scalar_type());
    context->save_for_backward({accumulator.grad_hidden, grad_weight});
    return accumulator.loss();
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    internal::require_first_order("chunked_cross_entropy");
    const at::Tensor& grad = grads[0];
    // If the graph dies with this pass, the kept gradients are nobody's but ours and are scaled where they lie: the
    // gradient of a vocabulary is often the largest tensor of a step.
    const bool in_place = !torch::autograd::get_current_graph_task_keep_graph();
    // In its wide type, like the share of a token. CUDA would round a tensor without dimensions to the type of the
    // other; the CPU does not, and would widen all of `kept` for one that has some.
    const at::Tensor factor = grad.is_cuda() ? grad.view({1}) : grad;
    variable_list scaled;
    for (at::Tensor& kept : context->get_saved_variables()) {
      if (!kept.defined()) {
        scaled.emplace_back();
      } else {
        scaled.push_back(in_place ? kept.mul_(factor) : kept.mul(factor).to(kept.scalar_type()));
      }
    }
    return {scaled[0], scaled[1], {}, {}, {}};
  }
};

}  // namespace

at::Tensor chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                 const LossOptions& options) {
  NEAP_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1),
             "[models] chunked_cross_entropy: expected hidden [tokens, size] and weight [vocabulary, size]; found ",
             hidden.sizes(), " and ", weight.sizes());
  NEAP_CHECK(labels.dim() == 1 && labels.size(0) == hidden.size(0),
             "[models] chunked_cross_entropy: expected one label per token; found ", labels.sizes(), " labels for ",
             hidden.size(0), " tokens");
  const bool recording = at::GradMode::is_enabled();
  const Wanted wanted{recording && hidden.requires_grad(), recording && weight.requires_grad()};
  return ChunkedCrossEntropyFunction::apply(hidden, weight, labels, &options, wanted);
}

}  // namespace neap::models
