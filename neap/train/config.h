// torch-free
// Everything a run can be told, as plain values. schema.h reads, checks and documents them; the values below are the
// documented defaults. Nothing here is read from anywhere else: what a run does is what its RunConfig says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/offload/options.h"
#include "neap/recompute/options.h"

namespace neap::train {

enum class Init { kPretrained, kRandom };
enum class MtpMode { kOff, kLoad, kTrain };
enum class DataFormat { kAutomatic, kNanoGpt, kLlmC, kMegatron, kText };
enum class Documents { kJoined, kMasked, kSeparate };
enum class TokenType { kUint8, kInt8, kUint16, kInt16, kUint32, kInt32, kInt64 };
enum class NonFinite { kStop, kSkip };
enum class Deterministic { kOff, kOn, kWarn };
enum class Schedule { kConstant, kLinear, kCosine };
enum class RecomputeMode { kNone, kFull, kSelective };
enum class Decay { kAll, kMatrices };
enum class ZeroStage { kOptimizer, kGradients, kParameters };
enum class GradientReduction { kAverage, kSum };
enum class DeviceKind { kCpu, kSim, kCuda };
enum class SimClock { kReal, kVirtual };
enum class Dtype { kFloat32, kBfloat16 };
enum class OptimType { kAdamW, kSgd };

struct ModelSection {
  std::string path;
  Init init = Init::kPretrained;
  MtpMode mtp = MtpMode::kOff;  // the layers that predict further tokens
};

// Adapters; the model itself is frozen then. On with a rank or a directory.
struct LoraSection {
  int64_t rank = 0;  // 0 = off
  double alpha = 16;
  double dropout = 0;
  std::vector<std::string> modules = {"q_proj", "v_proj"};
  std::string adapter;  // a directory of PEFT to go on from, which says all of the above itself

  bool on() const { return rank > 0 || !adapter.empty(); }
};

struct DataSection {
  std::string path;
  DataFormat format = DataFormat::kAutomatic;
  TokenType token_type = TokenType::kUint16;
  bool shuffle = true;
  std::string eval;  // held-out data; empty = none
  Documents documents = Documents::kJoined;
  std::optional<int64_t> end_token;  // of documents; none = what config.json says
};

struct TrainSection {
  int64_t steps = 100;
  int64_t batch = 1;
  int64_t sequence = 512;
  int64_t accumulation = 1;
  int64_t seed = 0;
  Deterministic deterministic = Deterministic::kOff;
  NonFinite non_finite = NonFinite::kStop;
  double expert_bias_rate = 1e-3;  // 0 = off
  // Instead of steps and accumulation; resolve() turns them into those.
  std::optional<int64_t> tokens;
  std::optional<int64_t> global_batch;  // sequences of all ranks in a step
  Dtype dtype = Dtype::kFloat32;        // of forward and backward; parameters stay float32
  double z_loss = 0;
  double mtp_weight = 0.1;   // of the loss of the layers that predict further tokens
  int64_t eval_every = 0;    // steps; 0 = after the last one alone
  int64_t eval_batches = 0;  // of each evaluation, over all ranks; 0 = all of data.eval
};

struct OptimSection {
  OptimType type = OptimType::kAdamW;
  double lr = 3e-4;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double momentum = 0;  // of sgd
  bool nesterov = false;
  double weight_decay = 0.1;
  Decay decay = Decay::kAll;
  Schedule schedule = Schedule::kCosine;
  int64_t warmup = 0;
  double final_ratio = 0.1;
  double clip = 1.0;  // 0 = off
};

struct DeviceSection {
  DeviceKind type = DeviceKind::kCpu;
  int64_t index = 0;
  // What follows describes the simulated accelerator. A rate of zero is no limit.
  int64_t count = 1;
  std::optional<Bytes> capacity;  // none = unlimited
  SimClock clock = SimClock::kVirtual;
  Bytes d2h_per_s{};
  Bytes h2d_per_s{};
  int64_t latency_ns = 5'000;
  double gflops = 50'000;
  Bytes hbm_per_s = Bytes(1'500'000'000'000);
  int64_t launch_ns = 4'000;
  bool hazard_check = false;
  std::optional<double> peak_flops;  // of one device, a second; none = unknown, on sim gflops
};

struct OffloadSection {
  // What the options mean, and their defaults, is written there; a run file begins with off.
  offload::Options options{.mode = offload::Mode::kOff};
  // Patterns of autograd/unit_selection.h; both lists count together.
  std::vector<std::string> modules;
  std::vector<std::string> layers;
};

struct RecomputeSection {
  RecomputeMode mode = RecomputeMode::kNone;
  recompute::Options options;
  // As in offload; kSelective alone.
  std::vector<std::string> modules;
  std::vector<std::string> layers;
};

// Of runs with several ranks; one rank alone shards nothing.
struct ParallelSection {
  int64_t shard = -1;            // ranks that share one copy of the parameters; -1 = all, or what replicate leaves
  std::optional<int> replicate;  // copies; none = what shard leaves
  ZeroStage stage = ZeroStage::kParameters;
  bool comm_fusion = true;
  GradientReduction reduce_op = GradientReduction::kAverage;
  Dtype reduce_dtype = Dtype::kFloat32;  // of gradients while ranks add them up
  Dtype output_dtype = Dtype::kFloat32;  // of the loss
  int64_t timeout_ns = 300'000'000'000;

  bool operator==(const ParallelSection&) const = default;
};

struct CheckpointSection {
  std::string dir;              // empty = checkpoints/ in log.dir
  int64_t every = 0;            // steps; 0 = never
  int64_t keep_last = 3;        // 0 = all
  std::string resume = "none";  // none, auto, or a path
  bool asynchronous = true;
  std::optional<Bytes> host_limit;  // of the copies that are written meanwhile; none = unlimited
  bool export_model = false;
};

// What a block of another system (foreign_blocks.h) asks of the model, checked when its number of layers is known.
struct LayerDemand {
  std::string key;      // of ours, for which it was asked
  std::string place;    // "run.yaml:12, swap.layer_swap[0].layers"
  std::string written;  // "0-10"
  int64_t last = -1;    // there must be this layer, …
  int64_t ahead = 0;    // … and one that comes so many later
};

struct LogSection {
  std::string dir;  // empty = runs/<name of the run file>
  bool trace = false;
  bool tensorboard = false;
};

struct RunConfig {
  ModelSection model;
  LoraSection lora;
  DataSection data;
  TrainSection train;
  OptimSection optim;
  DeviceSection device;
  OffloadSection offload;
  RecomputeSection recompute;
  ParallelSection parallel;
  CheckpointSection checkpoint;
  LogSection log;

  // Not of a section: left by the blocks of other systems.
  std::vector<LayerDemand> demands;
};

}  // namespace neap::train
