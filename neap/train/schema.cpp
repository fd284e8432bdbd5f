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
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The accessor of a key: config.SECTION.MEMBER.
#define AT(section, member) [](RunConfig& c) -> decltype(auto) { return (c.section.member); }

void add_model_and_data(std::vector<Key>& out) {
  out.push_back(text_key("model.path", AT(model, path), true,
                         "Hugging Face directory: config.json, and model.safetensors or its sharded index."));
  out.push_back(
      choice_key<Init>("model.init", AT(model, init), {{"pretrained", Init::kPretrained}, {"random", Init::kRandom}},
                       "Where the weights come from: the directory, or train.seed (then config.json is enough)."));
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
  out.push_back(integer_key("train.steps", AT(train, steps), 1, 1'000'000'000, "Optimizer steps."));
  out.push_back(integer_key("train.batch", AT(train, batch), 1, 1'000'000, "Sequences in one forward pass."));
  out.push_back(integer_key("train.sequence", AT(train, sequence), 1, 10'000'000, "Tokens in a sequence."));
  out.push_back(integer_key("train.accumulation", AT(train, accumulation), 1, 1'000'000,
                            "Forward and backward passes per step; their gradients are averaged over tokens."));
  out.push_back(integer_key("train.seed", AT(train, seed), 0, kAny, "Seed of the shuffle and of random weights."));
  out.push_back(choice_key<NonFinite>(
      "train.non_finite", AT(train, non_finite), {{"stop", NonFinite::kStop}, {"skip", NonFinite::kSkip}},
      "A loss or gradient norm that is not finite ends the run, or skips that update."));
}

void add_optim(std::vector<Key>& out) {
  out.push_back(number_key("optim.lr", AT(optim, lr), 0, 1000, "Peak learning rate of AdamW."));
  out.push_back(number_list_key("optim.betas", AT(optim, betas), 2, 0, 1, "Decay of the two running means."));
  out.push_back(number_key("optim.eps", AT(optim, eps), 1e-30, 1, "Added to the root of the second mean."));
  out.push_back(number_key("optim.weight_decay", AT(optim, weight_decay), 0, 1000,
                           "Decoupled from the gradient: p -= lr * weight_decay * p."));
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
  out.push_back(integer_key("device.index", AT(device, index), 0, 127, "Which device of that type."));
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
  out.push_back(duration_key("parallel.timeout", AT(parallel, timeout_ns),
                             "How long a rank waits for the others before the run ends with an error; at least 1ms."));
}

void add_log(std::vector<Key>& out) {
  out.push_back(
      text_key("log.dir", AT(log, dir), false,
               "Directory of metrics.jsonl, summary.json and trace.json. Empty: runs/ and the run file's name."));
  out.push_back(boolean_key("log.trace", AT(log, trace),
                            "Write trace.json (Perfetto, chrome://tracing): compute, copies, waits and memory."));
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
  NEAP_CHECK(config.optim.warmup <= config.train.steps, "[optim.warmup] expected at most train.steps, which is ",
             config.train.steps, "; found ", config.optim.warmup);
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

}  // namespace neap::train
