// torch-free
#include "neap/train/schema.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "neap/base/error.h"
#include "neap/train/key_types.h"

namespace neap::train {
namespace {

using namespace internal;

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostSteps = 1'000'000'000;
constexpr int64_t kMostAccumulation = 1'000'000;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The accessor of a key: config.SECTION.MEMBER.
#define AT(section, member) [](RunConfig& c) -> decltype(auto) { return (c.section.member); }

Key dtype_key(std::string path, Access<Dtype> at, std::string help) {
  return choice_key<Dtype>(std::move(path), std::move(at),
                           {{"float32", Dtype::kFloat32}, {"bfloat16", Dtype::kBfloat16}}, std::move(help));
}

void add_model_and_data(std::vector<Key>& out) {
  out.push_back(text_key("model.path", AT(model, path), true,
                         "Hugging Face directory: config.json, and model.safetensors or its sharded index."));
  out.push_back(
      choice_key<Init>("model.init", AT(model, init), {{"pretrained", Init::kPretrained}, {"random", Init::kRandom}},
                       "Where the weights come from: the directory, or train.seed (then config.json is enough)."));
  out.push_back(choice_key<MtpMode>(
      "model.mtp", AT(model, mtp), {{"off", MtpMode::kOff}, {"load", MtpMode::kLoad}, {"train", MtpMode::kTrain}},
      "Layers of a DeepSeek-V3 that predict further tokens (num_nextn_predict_layers). off: without them, and what the "
      "run exports has none; load: as they are, in all that the run saves; train: with train.mtp_weight."));
  out.push_back(text_key("data.path", AT(data, path), true,
                         "Token file (.bin); Megatron's NAME.bin with NAME.idx beside it, also as NAME; or any other "
                         "file, read as text with one token per byte."));
  out.push_back(
      choice_key<DataFormat>("data.format", AT(data, format),
                             {{"automatic", DataFormat::kAutomatic},
                              {"nanogpt", DataFormat::kNanoGpt},
                              {"llmc", DataFormat::kLlmC},
                              {"megatron", DataFormat::kMegatron},
                              {"text", DataFormat::kText}},
                             "nanogpt: bare tokens; llmc: llm.c's header of 1024 bytes; megatron: bare tokens "
                             "and an index; text: bytes. automatic: .bin with an .idx beside it is megatron, "
                             ".bin with llm.c's magic number llmc, any other .bin nanogpt, the rest text."));
  out.push_back(
      choice_key<TokenType>("data.token_type", AT(data, token_type),
                            {{"uint16", TokenType::kUint16},
                             {"uint32", TokenType::kUint32},
                             {"int32", TokenType::kInt32},
                             {"int64", TokenType::kInt64}},
                            "Type of the tokens in a nanogpt file. llm.c's header and Megatron's index say it "
                            "themselves."));
  out.push_back(
      boolean_key("data.shuffle", AT(data, shuffle),
                  "Sequences in a random order that train.seed and the epoch decide; false: as in the file."));
  out.push_back(text_key("data.eval", AT(data, eval), false,
                         "Held-out data of the same format, on which the loss is measured as train.eval_every says. "
                         "Empty: none."));
  out.push_back(choice_key<Documents>(
      "data.documents", AT(data, documents),
      {{"joined", Documents::kJoined}, {"masked", Documents::kMasked}, {"separate", Documents::kSeparate}},
      "Documents that share a sequence. joined: one text; masked: what follows a document's last token is not learned; "
      "separate: and a token attends to its own document alone, whose positions begin at 0."));
  out.push_back(optional_token_key("data.end_token", AT(data, end_token), "automatic",
                                   "The token that each document ends with, unless they are joined. automatic: "
                                   "eos_token_id of config.json."));
}

void add_lora(std::vector<Key>& out) {
  out.push_back(
      integer_key("lora.rank", AT(lora, rank), 0, 65536,
                  "Train adapters of this rank beside the model's linear layers, and nothing else; 0: train the "
                  "model. The run leaves them in adapter/, as PEFT has them."));
  out.push_back(number_key("lora.alpha", AT(lora, alpha), 0, 1e6, "An adapter's share is multiplied by alpha / rank."));
  out.push_back(number_key("lora.dropout", AT(lora, dropout), 0, 1, "Of the adapters' input; below 1."));
  out.push_back(text_list_key("lora.modules", AT(lora, modules), "list of names and patterns",
                              "Linear layers that get one: by the last part of their name, by a pattern such as "
                              "model.layers.{*}.mlp.up_proj, or all-linear."));
  out.push_back(text_key("lora.adapter", AT(lora, adapter), false,
                         "Directory of a PEFT adapter to go on from. Rank, alpha, dropout and modules are its own."));
}

void check_lora(const LoraSection& lora) {
  NEAP_CHECK(lora.adapter.empty() || lora.rank == 0,
             "[lora.rank] lora.adapter has a rank of its own; leave lora.rank out");
  NEAP_CHECK(lora.dropout < 1, "[lora.dropout] expected a probability below 1; found ", lora.dropout);
}

void add_train(std::vector<Key>& out) {
  out.push_back(integer_key("train.steps", AT(train, steps), 1, kMostSteps, "Optimizer steps."));
  out.push_back(optional_count_key("train.tokens", AT(train, tokens), "none",
                                   "Instead of train.steps: as many steps as take in so many tokens, over all ranks. "
                                   "The configuration that a run leaves has the steps."));
  out.push_back(integer_key("train.batch", AT(train, batch), 1, 1'000'000, "Sequences in one forward pass."));
  out.push_back(integer_key("train.sequence", AT(train, sequence), 1, 10'000'000, "Tokens in a sequence."));
  out.push_back(integer_key("train.accumulation", AT(train, accumulation), 1, kMostAccumulation,
                            "Forward and backward passes per step; their gradients are averaged over tokens."));
  out.push_back(
      optional_count_key("train.global_batch", AT(train, global_batch), "automatic",
                         "Instead of train.accumulation: sequences that all ranks together take in a step, so "
                         "that their number need not matter; a multiple of ranks × train.batch."));
  out.push_back(integer_key("train.seed", AT(train, seed), 0, kAny, "Seed of the shuffle and of random weights."));
  out.push_back(choice_key<Deterministic>(
      "train.deterministic", AT(train, deterministic),
      {{"false", Deterministic::kOff}, {"true", Deterministic::kOn}, {"warn", Deterministic::kWarn}},
      "true: operators that have the same bits each time; one that has no such implementation on the device ends the "
      "run, or with warn is told once. As torch.use_deterministic_algorithms()."));
  out.push_back(choice_key<NonFinite>(
      "train.non_finite", AT(train, non_finite), {{"stop", NonFinite::kStop}, {"skip", NonFinite::kSkip}},
      "A loss or gradient norm that is not finite ends the run, or skips that update."));
  out.push_back(
      number_key("train.expert_bias_rate", AT(train, expert_bias_rate), 0, 1,
                 "Models with experts: by how much a step moves the bias with which an expert is chosen, up if it had "
                 "fewer tokens "
                 "than the mean and down if more (arXiv 2412.19437, 2.1.2 and 4.2). 0 leaves the biases as they are."));
  out.push_back(
      dtype_key("train.dtype", AT(train, dtype),
                "What forward and backward compute in. bfloat16: over float32 parameters, which the optimizer "
                "steps; each layer is converted when it runs. On one rank, too."));
  out.push_back(number_key("train.z_loss", AT(train, z_loss), 0, 1,
                           "Adds so much of the square of logsumexp(logits) to each token's loss; 0: none."));
  out.push_back(number_key("train.mtp_weight", AT(train, mtp_weight), 0, 100,
                           "With model.mtp: train: what the loss of those layers, the mean over them, counts beside "
                           "the model's own (arXiv 2412.19437, 2.2 and 4.2: 0.3, later 0.1)."));
  out.push_back(integer_key("train.eval_every", AT(train, eval_every), 0, 1'000'000'000,
                            "Steps from one measurement on data.eval to the next; 0: after the last step alone. The "
                            "last step always ends with one."));
  out.push_back(integer_key("train.eval_batches", AT(train, eval_batches), 0, 1'000'000'000,
                            "Batches of train.batch sequences that each measurement takes, over all ranks, from the "
                            "beginning of data.eval; 0: all of it."));
}

void add_optim(std::vector<Key>& out) {
  out.push_back(choice_key<OptimType>("optim.type", AT(optim, type),
                                      {{"adamw", OptimType::kAdamW}, {"sgd", OptimType::kSgd}},
                                      "adamw: AdamW; sgd: stochastic gradient descent, with momentum if asked for."));
  out.push_back(number_key("optim.lr", AT(optim, lr), 0, 1000, "Peak learning rate."));
  out.push_back(number_list_key("optim.betas", AT(optim, betas), 2, 0, 1, "adamw: decay of the two running means."));
  out.push_back(number_key("optim.eps", AT(optim, eps), 1e-30, 1, "adamw: added to the root of the second mean."));
  out.push_back(
      number_key("optim.momentum", AT(optim, momentum), 0, 1, "sgd: decay of the running gradient; 0: none."));
  out.push_back(boolean_key("optim.nesterov", AT(optim, nesterov), "sgd: look one step of the momentum ahead."));
  out.push_back(number_key("optim.weight_decay", AT(optim, weight_decay), 0, 1000,
                           "adamw: decoupled from the gradient, p -= lr * weight_decay * p. sgd: added to the "
                           "gradient, g += weight_decay * p."));
  out.push_back(choice_key<Decay>("optim.decay", AT(optim, decay),
                                  {{"all", Decay::kAll}, {"matrices", Decay::kMatrices}},
                                  "Which parameters decay: all, as in torch.optim.AdamW, or only those of two or more "
                                  "dimensions, which leaves out norms and biases."));
  out.push_back(choice_key<Schedule>(
      "optim.schedule", AT(optim, schedule),
      {{"constant", Schedule::kConstant}, {"linear", Schedule::kLinear}, {"cosine", Schedule::kCosine}},
      "Course of the learning rate after the warm-up, to the last step."));
  out.push_back(integer_key("optim.warmup", AT(optim, warmup), 0, 1'000'000'000,
                            "Steps over which the rate rises linearly to its peak; at most train.steps."));
  out.push_back(number_key("optim.final_ratio", AT(optim, final_ratio), 0, 1,
                           "Rate at the end of linear and cosine, as a part of the peak."));
  out.push_back(number_key("optim.clip", AT(optim, clip), 0, kInfinity,
                           "Largest norm of all gradients together; 0 does not clip."));
}

void add_device(std::vector<Key>& out) {
  out.push_back(
      choice_key<DeviceKind>("device.type", AT(device, type),
                             {{"cpu", DeviceKind::kCpu}, {"sim", DeviceKind::kSim}, {"cuda", DeviceKind::kCuda}},
                             "Where the model lives. sim is the simulated accelerator."));
  out.push_back(
      integer_key("device.index", AT(device, index), 0, 127,
                  "Which device of that type; with several ranks on cuda the first one, that of local rank 0."));
  out.push_back(integer_key("device.count", AT(device, count), 1, 8, "sim: number of devices."));
  out.push_back(
      optional_bytes_key("device.capacity", AT(device, capacity), "unlimited", "sim: memory of each device."));
  out.push_back(choice_key<SimClock>(
      "device.clock", AT(device, clock), {{"real", SimClock::kReal}, {"virtual", SimClock::kVirtual}},
      "sim: measured time, or time computed from the values below, equal on every machine."));
  out.push_back(
      rate_key("device.d2h", AT(device, d2h_per_s),
               "sim: rate of the link from device to host; unlimited counts as 25GB/s on the virtual clock."));
  out.push_back(rate_key("device.h2d", AT(device, h2d_per_s), "sim: the same from host to device."));
  out.push_back(duration_key("device.latency", AT(device, latency_ns), "sim: time before a copy's first byte."));
  out.push_back(number_key("device.gflops", AT(device, gflops), 1, 1e12, "sim: 10^9 operations per second."));
  out.push_back(rate_key("device.hbm", AT(device, hbm_per_s), "sim: rate of the device's own memory."));
  out.push_back(duration_key("device.launch", AT(device, launch_ns), "sim: host time to launch one kernel."));
  out.push_back(boolean_key("device.hazard_check", AT(device, hazard_check),
                            "sim: report use of memory that a queued copy still reads or writes."));
  out.push_back(optional_number_key("device.peak_flops", AT(device, peak_flops), "automatic",
                                    "Operations per second that one device can do, for the utilisation in metrics and "
                                    "progress. automatic: device.gflops on sim, else unknown."));
}

void add_offload(std::vector<Key>& out) {
  using offload::Mode;
  out.push_back(choice_key<Mode>(
      "offload.mode", AT(offload, options.mode), {{"off", Mode::kOff}, {"sync", Mode::kSync}, {"async", Mode::kAsync}},
      "Saved activations leave the device until backward needs them: not at all, in line with compute, or beside it."));
  out.push_back(text_list_key("offload.modules", AT(offload, modules), "list of patterns",
                              "Modules whose activations may leave, such as model.layers.{*} or model.layers.{*}.mlp. "
                              "None here and in offload.layers: the model's own list of layers."));
  out.push_back(text_list_key("offload.layers", AT(offload, layers), "list of numbers and ranges",
                              "The same by index into the model's list of layers: 5, 0-10."));
  out.push_back(bytes_key("offload.device_budget", AT(offload, options.device_budget),
                          "Saved activations that may stay on the device; those needed last leave first."));
  out.push_back(bytes_key("offload.min_bytes", AT(offload, options.min_bytes), "Smaller activations stay."));
  out.push_back(prefetch_key("offload.prefetch", AT(offload, options.prefetch),
                             "How far ahead of backward activations return: layers, bytes, or as measurements ask."));
  out.push_back(optional_integer_key(
      "offload.keep_last", AT(offload, options.keep_last), "automatic",
      "Modules at the end of the forward pass whose activations stay, since backward begins there. automatic: one, or "
      "with automatic prefetch as many bytes as reloads need for a head start."));
  out.push_back(bytes_key("offload.max_in_flight", AT(offload, options.max_in_flight),
                          "Bytes on their way to the host at one time; at this bound compute waits."));
  out.push_back(optional_bytes_key("offload.device_limit", AT(offload, options.device_limit), "none",
                                   "Device memory in use, of whatever kind, above which no activation returns ahead of "
                                   "its use; compute waits then."));
  out.push_back(bytes_key("offload.host_cache_limit", AT(offload, options.host_cache_limit),
                          "Idle host memory kept for the next step; 0 keeps none."));
  out.push_back(optional_bytes_key("offload.host_limit", AT(offload, options.host_limit), "none",
                                   "All host memory for activations; beyond it they stay on the device."));
  out.push_back(boolean_key("offload.pin", AT(offload, options.pin),
                            "Page-locked host memory, which copies need to run beside compute."));
}

void add_recompute(std::vector<Key>& out) {
  using enum RecomputeMode;
  out.push_back(choice_key<RecomputeMode>(
      "recompute.mode", AT(recompute, mode), {{"none", kNone}, {"full", kFull}, {"selective", kSelective}},
      "Modules that keep nothing of their forward pass but its inputs and run again for backward: none, every layer of "
      "the model, or those of recompute.modules and recompute.layers. With offload the inputs leave the device."));
  out.push_back(text_list_key("recompute.modules", AT(recompute, modules), "list of patterns",
                              "selective: modules, such as model.layers.{*}.mlp."));
  out.push_back(text_list_key("recompute.layers", AT(recompute, layers), "list of numbers and ranges",
                              "selective: the same by index into the model's list of layers: 5, 0-10."));
  out.push_back(boolean_key("recompute.preserve_rng", AT(recompute, options.preserve_rng),
                            "The second run draws the random numbers of the first."));
  out.push_back(boolean_key("recompute.early_stop", AT(recompute, options.early_stop),
                            "The second run ends with the last tensor that backward needs."));
  out.push_back(boolean_key("recompute.debug", AT(recompute, options.debug),
                            "Keep what the first run saved, compare the second with it bit by bit, and name the first "
                            "tensor that differs. Costs more memory than is saved."));
}

void add_parallel(std::vector<Key>& out) {
  out.push_back(integer_key("parallel.shard", AT(parallel, shard), -1, 1'000'000,
                            "Ranks that share one copy of the model in pieces; -1: all of them, or as many as "
                            "parallel.replicate leaves. All keys of this section: runs with several ranks."));
  out.push_back(
      optional_integer_key("parallel.replicate", AT(parallel, replicate), "automatic",
                           "Copies of the model (HSDP); automatic: the number of ranks over parallel.shard."));
  out.push_back(choice_key<ZeroStage>("parallel.stage", AT(parallel, stage),
                                      {{"optim", ZeroStage::kOptimizer},
                                       {"optim_grads", ZeroStage::kGradients},
                                       {"optim_grads_params", ZeroStage::kParameters}},
                                      "What stays in pieces within a step, too (ZeRO 1, 2, 3): optimizer state alone, "
                                      "gradients as well, parameters as well."));
  out.push_back(boolean_key("parallel.comm_fusion", AT(parallel, comm_fusion),
                            "One gather and one scatter for all parameters of a layer; false: one for each."));
  out.push_back(choice_key<GradientReduction>(
      "parallel.reduce_op", AT(parallel, reduce_op),
      {{"avg", GradientReduction::kAverage}, {"sum", GradientReduction::kSum}},
      "avg: gradients are means over all tokens of the step; sum: the sum of each rank's own mean, so larger by the "
      "number of ranks."));
  out.push_back(
      dtype_key("parallel.reduce_dtype", AT(parallel, reduce_dtype),
                "In which gradients are held and added up over ranks and micro-batches. Also of one rank with "
                "train.dtype: bfloat16."));
  out.push_back(dtype_key("parallel.output_dtype", AT(parallel, output_dtype),
                          "To which the loss is rounded; it is computed in float32."));
  out.push_back(duration_key("parallel.timeout", AT(parallel, timeout_ns),
                             "How long a rank waits for the others before the run ends with an error; at least 1ms."));
}

void add_checkpoint(std::vector<Key>& out) {
  out.push_back(text_key("checkpoint.dir", AT(checkpoint, dir), false,
                         "Directory of the checkpoints. Empty: checkpoints/ in log.dir. All ranks see the same one."));
  out.push_back(integer_key("checkpoint.every", AT(checkpoint, every), 0, kAny,
                            "Steps from one checkpoint to the next; there is also one at the end of the run, or when a "
                            "signal stops it. 0: none at all."));
  out.push_back(integer_key("checkpoint.keep_last", AT(checkpoint, keep_last), 0, 1'000'000,
                            "How many stay, the newest; 0: all."));
  out.push_back(text_key("checkpoint.resume", AT(checkpoint, resume), false,
                         "Where the run begins: none, at the beginning; auto, after the newest complete checkpoint of "
                         "checkpoint.dir, or at the beginning if there is none; else the path of a checkpoint, or of a "
                         "directory of them."));
  out.push_back(boolean_key("checkpoint.asynchronous", AT(checkpoint, asynchronous),
                            "Write while the run goes on, from a copy in host memory; false: the run waits."));
  out.push_back(optional_bytes_key("checkpoint.host_limit", AT(checkpoint, host_limit), "unlimited",
                                   "checkpoint.asynchronous: pinned host memory that this copy may take on each rank; "
                                   "where it needs more, the run waits, with a warning."));
  out.push_back(boolean_key("checkpoint.export", AT(checkpoint, export_model),
                            "Leave the trained model in hf/ in log.dir as a Hugging Face directory."));
}

void add_log(std::vector<Key>& out) {
  out.push_back(
      text_key("log.dir", AT(log, dir), false,
               "Directory of metrics.jsonl, summary.json and trace.json. Empty: runs/ and the run file's name."));
  out.push_back(boolean_key("log.trace", AT(log, trace),
                            "Write trace.json (Perfetto, chrome://tracing): compute, copies, waits and memory."));
  out.push_back(boolean_key("log.tensorboard", AT(log, tensorboard),
                            "Write what metrics.jsonl has as events for TensorBoard, too: events.out.tfevents.*."));
}

#undef AT

// Levenshtein distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

std::string_view last_segment(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

void check_optim(const OptimSection& optim) {
  NEAP_CHECK(!optim.nesterov || optim.momentum > 0,
             "[optim.nesterov] expected optim.momentum above 0 beside it; found ", optim.momentum);
  NEAP_CHECK(optim.type == OptimType::kSgd || (optim.momentum == 0 && !optim.nesterov),
             "[optim.momentum] expected optim.type: sgd beside momentum; found adamw, whose running means optim.betas "
             "describes");
}

void check_evaluation(const RunConfig& config) {
  const bool asked = config.train.eval_every > 0 || config.train.eval_batches > 0;
  NEAP_CHECK(!asked || !config.data.eval.empty(), "[",
             config.train.eval_every > 0 ? "train.eval_every" : "train.eval_batches",
             "] expected data.eval beside it: the held-out data; found none");
}

void check_mtp(const RunConfig& config) {
  NEAP_CHECK(config.model.mtp != MtpMode::kTrain || config.train.mtp_weight > 0,
             "[train.mtp_weight] expected a weight above 0 with model.mtp: train; found 0; model.mtp: load keeps the "
             "layers that predict further tokens as they are");
}

void check_recompute(const RecomputeSection& recompute) {
  const bool chosen = !recompute.modules.empty() || !recompute.layers.empty();
  NEAP_CHECK(recompute.mode != RecomputeMode::kSelective || chosen,
             "[recompute.mode] selective needs to be told what: give recompute.modules or recompute.layers, or choose "
             "full");
  NEAP_CHECK(recompute.mode != RecomputeMode::kFull || !chosen,
             "[recompute.mode] full is every layer, but recompute.modules or recompute.layers choose some; take them "
             "out, or choose selective");
}

void check_parallel(const ParallelSection& parallel) {
  NEAP_CHECK(parallel.shard != 0, "[parallel.shard] expected a number of ranks, or -1 for all of them; found 0");
  NEAP_CHECK(parallel.replicate != 0, "[parallel.replicate] expected a number of copies from 1, or automatic; found 0");
  NEAP_CHECK(parallel.timeout_ns >= 1'000'000, "[parallel.timeout] expected a time of at least 1ms; found ",
             parallel.timeout_ns, "ns");
}

void check_warmup(const RunConfig& config) {
  NEAP_CHECK(config.optim.warmup <= config.train.steps, "[optim.warmup] expected at most train.steps, which is ",
             config.train.steps, "; found ", config.optim.warmup);
}

int64_t tokens_of_step(const TrainSection& train, int64_t ranks) {
  int64_t tokens = ranks;
  for (const int64_t factor : {train.batch, train.accumulation, train.sequence}) {
    NEAP_CHECK(!__builtin_mul_overflow(tokens, factor, &tokens),
               "[train.batch] expected a step of less than 2^63 tokens; found train.batch: ", train.batch,
               ", train.accumulation: ", train.accumulation, " and train.sequence: ", train.sequence, " on ", ranks,
               ranks == 1 ? " rank" : " ranks");
  }
  return tokens;
}

std::string_view first_segment(std::string_view path) { return path.substr(0, path.find('.')); }

}  // namespace

const std::vector<Key>& keys() {
  static const std::vector<Key> all = [] {
    std::vector<Key> out;
    add_model_and_data(out);
    add_lora(out);
    add_train(out);
    add_optim(out);
    add_device(out);
    add_offload(out);
    add_recompute(out);
    add_parallel(out);
    add_checkpoint(out);
    add_log(out);
    return out;
  }();
  return all;
}

const Key* find_key(std::string_view path) {
  const auto found = std::ranges::find(keys(), path, &Key::path);
  return found == keys().end() ? nullptr : &*found;
}

bool is_section(std::string_view path) {
  return std::ranges::any_of(keys(), [&](const Key& key) { return first_segment(key.path) == path; });
}

std::string nearest_key(std::string_view path) {
  // A right name in the wrong section is likelier than a wrong name, so an equal last segment counts as one edit.
  const auto cost = [&](std::string_view candidate) {
    const size_t whole = distance(path, candidate);
    const size_t last = distance(last_segment(path), last_segment(candidate)) + 1;
    return std::min(whole, last);
  };
  std::string best = keys().front().path;
  for (const Key& key : keys()) {
    if (cost(key.path) < cost(best)) best = key.path;
  }
  if (path.find('.') == std::string_view::npos) {
    for (const Key& key : keys()) {
      const std::string_view section = first_segment(key.path);
      if (distance(path, section) <= 2 && distance(path, section) < cost(best)) best = section;
    }
  }
  return best;
}

void throw_unknown_key(std::string_view path, std::string_view place) {
  NEAP_USER_ERROR("[", place, "] unknown key ", path, "; nearest known key: ", nearest_key(path));
}

void check(const RunConfig& config) {
  NEAP_CHECK(!config.model.path.empty(), "[model.path] this key is required: the directory of the model");
  NEAP_CHECK(!config.data.path.empty(), "[data.path] this key is required: the file of training data");
  // Of train.tokens the number of ranks makes steps: resolve().
  if (!config.train.tokens) check_warmup(config);
  check_optim(config.optim);
  check_evaluation(config);
  check_mtp(config);
  check_lora(config.lora);
  check_recompute(config.recompute);
  check_parallel(config.parallel);
  if (config.device.type == DeviceKind::kSim) {
    NEAP_CHECK(config.device.index < config.device.count, "[device.index] expected less than device.count, which is ",
               config.device.count, "; found ", config.device.index);
  } else if (config.device.type == DeviceKind::kCpu) {
    NEAP_CHECK(config.device.index == 0, "[device.index] expected 0, the only cpu; found ", config.device.index);
  }
}

// What a run leaves says steps and accumulation, and is read again: they have to be what those keys take.
RunConfig resolve(RunConfig config, int64_t ranks, TakenBefore before) {
  TrainSection& train = config.train;
  if (train.global_batch) {
    const int64_t micro = ranks * train.batch;
    NEAP_CHECK(*train.global_batch % micro == 0, "[train.global_batch] expected a multiple of ", micro,
               ", train.batch: ", train.batch, " of ", ranks, ranks == 1 ? " rank" : " ranks", "; found ",
               *train.global_batch);
    train.accumulation = *train.global_batch / micro;
    NEAP_CHECK(train.accumulation <= kMostAccumulation, "[train.global_batch] expected at most ", kMostAccumulation,
               " times ", micro, ", train.batch: ", train.batch, " of ", ranks, ranks == 1 ? " rank" : " ranks",
               "; found ", *train.global_batch, "; a larger train.batch makes fewer passes");
    train.global_batch.reset();
  }
  const int64_t step = tokens_of_step(train, ranks);
  if (!train.tokens) return config;
  const int64_t left = std::max<int64_t>(*train.tokens - before.tokens, 0);
  train.steps = before.steps + left / step + (left % step == 0 ? 0 : 1);
  NEAP_CHECK(train.steps <= kMostSteps, "[train.tokens] expected at most ", kMostSteps, " steps of ", step,
             " tokens; found ", *train.tokens, ", which are ", train.steps, " steps");
  train.tokens.reset();
  check_warmup(config);
  return config;
}

}  // namespace neap::train
