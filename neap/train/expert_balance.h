// Keeps the experts of a model equally busy without a loss for it (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): after
// each step the bias with which an expert is chosen falls by a fixed rate if the expert had more tokens than the mean
// of its layer, and rises by as much if it had fewer.
//
// Tokens are counted over all micro-batches and ranks of a step, so the biases, which lie whole on every rank, stay
// equal. Counts are integers: the update does not depend on how a batch was split. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace neap::comm {
class World;
}
namespace neap::models {
class MixtureOfExperts;
}

namespace neap::train {

class ExpertBalance {
 public:
  // Tokens that each expert was given in a step, layer by layer of those that have experts.
  using Load = std::vector<std::vector<int64_t>>;

  // `layers`: at least one, all with the same number of experts; they live longer. `world` is null for one rank.
  ExpertBalance(std::vector<models::MixtureOfExperts*> layers, double rate, comm::World* world);

  // Forgets what was counted so far, by a step that failed.
  void begin_step();
  // The load of the step; moves the biases if `update`, on the stream that is current. Collective; does not wait for
  // the device.
  Load end_step(bool update);

 private:
  std::vector<models::MixtureOfExperts*> layers_;
  double rate_;
  comm::World* world_;
};

}  // namespace neap::train
