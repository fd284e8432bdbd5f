// Parameters, gradients and optimizer state in pieces over the ranks: start here.
//
//   auto world = comm::World::connect(comm::Launch::from_environment());
//   const comm::Mesh mesh(world->size(), world->rank());
//   shard::Sharded sharded = shard::fully_shard(*model, world->groups(mesh));
//   torch::optim::AdamW optimizer(model->parameters(), 1e-3);   // after sharding: its state is in pieces, too
//   …
//   at::Tensor loss = sharded.run([&] { return model->loss(ids, labels); });
//   loss.backward();
//   sharded.clip_grad_norm(1.0);
//   optimizer.step();
//
// Between steps every parameter *is* this rank's piece, a one-dimensional and possibly empty range of its elements; any
// optimizer that works element by element steps it as it is. While a unit runs forward or backward the same objects
// are the full parameters. Gradients come reduced over all ranks, in the shape of the piece.
//
// Units are modules that run through a hook point (neap/autograd/hook_point.h); parameters that belong to no unit make
// up the root unit, whose forward is what run() is given. It stays unsharded from there to the end of backward. What
// the mesh's replicate dimension holds several times over is averaged there, too (HSDP).
//
// Every rank has to run the same units in the same order; a parameter may be unused on some ranks, a unit may not. With
// comm's rank-ordered sums training has the same bits as one process that runs the ranks' micro-batches one after
// another and adds their gradients in rank order (with several replicas: first within each, then over them).
//
// A Sharded must outlive neither model nor graphs; when it goes, hooks go, and parameters stay pieces (see dissolve()).
// One thread at a time. The groups must live as long as the Sharded.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/comm/world.h"
#include "neap/shard/ledger.h"
#include "neap/shard/named_unit.h"
#include "neap/shard/options.h"

namespace torch::nn {
class Module;
}

namespace neap::shard {

// This rank's piece of one parameter.
struct Shard {
  std::string name;                // as in named_parameters()
  std::vector<int64_t> full_size;  // of the whole parameter
  int64_t begin = 0, end = 0;      // elements of it, flattened in the order of its memory
  at::Tensor data;                 // one-dimensional; lies in the flat shard
};

// The parameters of one group at once, for optimizers that need no borders between them.
struct FlatShard {
  at::Tensor data;      // one-dimensional, with padding that stays as it is under a gradient of 0
  at::Tensor gradient;  // undefined when some parameter has none: step those that have one by one then
};

class Sharded {
 public:
  ~Sharded();
  Sharded(Sharded&&) noexcept;
  Sharded& operator=(Sharded&&) noexcept;

  // Runs the model's forward, whatever that is: `body` returns a Tensor or a value for_each_tensor() can look into.
  template <class Body>
  auto run(Body&& body) {
    auto result = root_point().run(at::ArrayRef<at::Tensor>(), std::forward<Body>(body));
    if constexpr (std::is_same_v<decltype(result), at::Tensor>) {
      return to_output_dtype(std::move(result));
    } else {
      return result;
    }
  }

  // Runs the forward of a unit whose module has no hook point of its own. UserError when the module is none of them.
  template <class Body>
  auto unit(const torch::nn::Module& module, at::ArrayRef<at::Tensor> inputs, Body&& body) {
    return unit_point(module).run(inputs, std::forward<Body>(body));
  }

  // While the result lives, backward keeps full gradients on this rank and reduces nothing; the first backward after it
  // reduces what came together. Without it each backward reduces, and pieces add up until zero_grad().
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(Sharded& sharded);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Sharded& sharded_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(*this); }

  // Calls `body` with all parameters full, one unit after the other being gathered; what it writes is kept when
  // `write_back` is set and every rank writes the same, else a UserError (of one rank that has nothing to gather it is
  // kept anyhow). Between steps. Collective. Holds the whole model.
  void with_full_parameters(c10::function_ref<void()> body, bool write_back = false);
  // Lets go of full parameters that a forward without a backward has left.
  void reshard();

  // The norm of all gradients of all ranks, each once; p is 1, 2, … or infinity. Collective, whatever a rank holds.
  // Sums run in float64, so the norm hardly depends on the number of ranks; only for equal numbers it is bit-equal.
  double grad_norm(double p = 2);
  // Multiplies the gradients by max_norm / (norm + 1e-6) when that is below 1, as torch.nn.utils.clip_grad_norm_ does.
  // Returns the norm before.
  double clip_grad_norm(double max_norm, double p = 2);

  // In the order of the model; a tied parameter once.
  [[nodiscard]] std::vector<at::Tensor> parameters() const;
  // Between steps. Nothing is copied.
  [[nodiscard]] std::vector<Shard> shards();
  [[nodiscard]] std::vector<FlatShard> flat_shards();
  // Full parameters on the CPU, on rank 0 of each shard group; empty on the others. Collective; one group at a time,
  // and none of which no parameter is wanted. Every rank wants the same; an empty function wants all.
  std::map<std::string, at::Tensor> full_state(const std::function<bool(const std::string& name)>& wanted = {});
  // Pieces of any sharding, as shards() gave them there, on any device; this rank keeps what it needs of them.
  // UserError when they do not cover this rank's pieces, or are unknown, and then nothing has changed.
  void load_shards(const std::vector<Shard>& pieces);
  // Every rank is given the full parameters and keeps its piece. UserError for names that are missing or unknown, or
  // other shapes, and then nothing has changed.
  void load_full_state(const std::map<std::string, at::Tensor>& state);
  // The checks of the two alone.
  void check_shards(const std::vector<Shard>& pieces);
  void check_full_state(const std::map<std::string, at::Tensor>& state);

  [[nodiscard]] Usage usage() const;
  // From here on `look` is called before full parameters or gradients come or go, on the thread that runs the unit, and
  // held() says what is held, at any time and at no cost. Only pieces of gradients that zero_grad() drops count until
  // the next watch_memory(). `look` must not throw. Empty: no more calls.
  void watch_memory(std::function<void()> look);
  [[nodiscard]] Held held() const;
  // Peaks begin at the present level.
  void reset_peak();
  [[nodiscard]] std::vector<std::string> unit_names() const;  // the root, "", last
  [[nodiscard]] const Options& options() const;

  // Gives every parameter its full storage back, drops gradients and ends the sharding. Collective. Between steps.
  void dissolve();

 private:
  class Impl;
  friend Sharded fully_shard(torch::nn::Module&, comm::MeshGroups, Options);
  friend Sharded fully_shard(const std::vector<NamedUnit>&, comm::MeshGroups, Options);
  explicit Sharded(std::unique_ptr<Impl> impl);

  autograd::HookPoint& root_point();
  autograd::HookPoint& unit_point(const torch::nn::Module& module);
  at::Tensor to_output_dtype(at::Tensor result) const;

  std::unique_ptr<Impl> impl_;
};

// Shards in place. All ranks hold the same values before, or Options::initialize fills a model of the meta device.
// At most one group's shard is alive beside the parameters it is made of. UserError, with nothing changed, for what
// cannot be sharded: a parameter of two units, two parameters over one memory, parameters that are no dense leaves,
// have gradients or belong to a living graph, a model that is sharded already.
Sharded fully_shard(torch::nn::Module& model, comm::MeshGroups groups, Options options = {});
// The same for a model whose units are known already, say one that is written in another language: the root last, of
// which there must be one, and Options::modules without a meaning. Forwards run through the units' own hook points.
Sharded fully_shard(const std::vector<NamedUnit>& units, comm::MeshGroups groups, Options options = {});
// Throws what that would throw, and changes nothing.
void check_shardable(const std::vector<NamedUnit>& units, const Options& options);

}  // namespace neap::shard
