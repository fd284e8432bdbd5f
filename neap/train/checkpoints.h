// The checkpoints of a run: what its state is, when it is saved, and how a run goes on from one.
//
// The state is parameters and buffers, what the optimizer remembers, the generators of the CPU and of the
// device on each rank, and the numbers of steps and of sequences taken; the learning rate and the order of the data
// follow from those. With it are the configuration and what the model and the data were, so that another run is told
// from this one.
//
// A run that goes on has the bits of one that never stopped: with equal ranks, batches and settings. With other ranks
// it reads the pieces it needs of the files of all, and goes on at the same sequence; if ranks × accumulation × batch
// is the same, each step has the same sequences, and numbers differ as those of so many ranks do (parallel.h). Rank r
// then takes over the generators of rank r modulo the number of ranks before.
//
// Member functions are collective and called from one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "neap/checkpoint/reader.h"
#include "neap/checkpoint/saver.h"
#include "neap/train/config.h"
#include "neap/train/optimizer.h"
#include "neap/train/sequences.h"

namespace torch::nn {
class Module;
}
namespace neap::comm {
class World;
}
namespace neap::shard {
class Sharded;
}

namespace neap::train {

// How far a run has come.
struct Taken {
  int64_t steps = 0;
  int64_t sequences = 0;  // by all ranks
};

struct ModelState {
  torch::nn::Module& model;
  shard::Sharded* sharded = nullptr;  // of `model`, if it is in pieces
  Optimizer& optimizer;
  c10::Device device = c10::kCPU;
};

class Checkpoints {
 public:
  // Finds what checkpoint.resume names and compares it with this run. UserError for what does not fit, also for
  // checkpoints of another run in a directory that this one would save to. Reads an index at most; writes nothing.
  // `config`: resolved (schema.h), but for train.tokens: what is left of them is counted here.
  // `model`: its config.json. `more` stands in each checkpoint, too; what of it describes adapters (resumption.h) has
  // to be what it was.
  Checkpoints(const RunConfig& config, std::string model, const Sequences& sequences, comm::World* world,
              checkpoint::State more = {});

  // Of the run, all of it resolved.
  const RunConfig& config() const noexcept { return config_; }
  // Where the run begins.
  Taken start() const noexcept { return start_; }
  // For people: one line on resuming, if the run file asks for it, and one on saving.
  const std::string& resume_line() const noexcept { return resume_line_; }
  std::string save_line() const;

  // Fills `state` from the checkpoint, if there is one. UserError on every rank, when something is wrong on any.
  void restore(const ModelState& state);

  // Saves if it is time to, and completes what an earlier call has begun.
  void after_step(const ModelState& state, Taken taken);
  // Saves what is not saved yet, if the run saves at all, and waits until it is on the disk.
  void finish(const ModelState& state, Taken taken);
  // Completes what after_step() has begun.
  void complete() { saver_.finish(); }

 private:
  std::optional<std::filesystem::path> find() const;
  void check_directory() const;
  void open(const std::filesystem::path& path);
  void save(const ModelState& state, Taken taken);

  RunConfig config_;
  const CheckpointSection options_;
  const std::filesystem::path dir_;
  comm::World* world_;
  checkpoint::State description_;  // of the run, in each of its checkpoints
  std::optional<checkpoint::Reader> reader_;
  checkpoint::Saver saver_;
  Taken start_;
  int64_t saved_ = 0;  // at this step
  std::string resume_line_;
};

// Directory of a run's checkpoints: checkpoint.dir, or checkpoints/ in log.dir.
std::filesystem::path checkpoint_directory(const RunConfig& config);

// "parameter.NAME", "buffer.NAME": how a checkpoint calls the parameter or buffer NAME.
inline constexpr const char* kParameterPrefix = "parameter.";
inline constexpr const char* kBufferPrefix = "buffer.";
// What of the model's directory the run is without, for people.
inline constexpr const char* kLeftOut = "left_out";

}  // namespace neap::train
