// Parameters that share a dtype, kept in pieces over flat buffers; internal to the layer (fully_shard.h is the door).
//
//   flat shard       this rank's piece, always there; what the optimizer steps
//   flat unsharded   all parameters, between begin_unshard() and reshard()
//   flat gradient    all gradients, from open_gradients() to the end of the reduction
//
// One TensorImpl per parameter for ever: it looks at the shard between steps and at the unsharded buffer in between.
// Only its metadata changes hands, so module members, optimizers and handles all see the same object. Its gradient
// accumulator, created while it is full, stays valid, also when the two dtypes differ. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/comm/group.h"
#include "neap/shard/flat_buffer.h"
#include "neap/shard/flat_layout.h"
#include "neap/shard/full_gradient.h"
#include "neap/shard/ledger.h"
#include "neap/shard/named_unit.h"
#include "neap/shard/options.h"

namespace neap::shard {

// The groups of ranks that the pieces are exchanged in.
struct Ranks {
  comm::Group& shard;
  comm::Group& replicate;

  int count() const { return shard.size() * replicate.size(); }
};

class FlatGroup {
 public:
  // UserError for a parameter that cannot be sharded.
  static void check(const NamedParameter& parameter, const Options& options);

  // Takes the parameters' own storages away and leaves this rank's pieces. REQUIRES: checked parameters, at least one.
  FlatGroup(std::string unit, std::vector<NamedParameter> parameters, Ranks ranks, const Options& options,
            Ledger& ledger);
  ~FlatGroup();
  FlatGroup(const FlatGroup&) = delete;
  FlatGroup& operator=(const FlatGroup&) = delete;

  // Starts the gather; between the two the parameters still look at their shards. Both idempotent.
  void begin_unshard();
  void finish_unshard();
  // Also gives up a gather that was begun. What was written to a full parameter meanwhile would be lost: UserError, and
  // the group is resharded all the same.
  void reshard();
  void reshard_quietly() noexcept;
  // For a backward that reads no parameters: they have their full shapes, which gradients are held against, and no
  // memory. Does nothing when more than that is there. reshard() ends it.
  void show_full_shape();
  bool unsharded() const { return state_ == State::kUnsharded; }

  // From here on backward accumulates into the flat gradient. Called for each call of the unit; does nothing when open.
  // `single_pass` as of FullGradient::open(). REQUIRES: parameters of full shape.
  void open_gradients(bool single_pass);
  bool gradients_open() const { return open_; }
  // Trainable parameters that this pass has still to bring a gradient for.
  int64_t pending() const { return pending_; }
  void gradient_arrived(std::size_t index);
  // Keeps the flat gradient for the next pass.
  void hold_gradients();
  bool gradients_held() const { return !open_ && gradient_.exists() && !reducing_; }
  // Starts the reduction of what open_gradients() collected, or of what is held.
  void begin_reduce();
  // When the pieces have arrived: lets the flat gradient go and starts adding up over replicas. Then the end of it.
  void begin_replicas();
  void finish_reduce();
  bool reducing() const { return reducing_; }

  // At the end of a pass. flags() says which parameters had a gradient on this rank since the last reduction; with
  // what all ranks say, the reduced pieces become the parameters' gradients, added to those that were there before.
  void append_flags(std::vector<int32_t>& flags) const;
  void hand_over(const int32_t*& flags);
  // After a failed pass: its gradients are gone, those from before it are back.
  void drop_gradients() noexcept;

  // Gives every parameter a storage of its own again, full, and drops its gradient; the group is empty then.
  // Collective.
  void dissolve();
  // Hands out every full parameter in the dtype of the shards, whatever param_dtype is. Collective. REQUIRES:
  // resharded.
  void gather_in_own_dtype(c10::function_ref<void(std::size_t index, const at::Tensor& full)> visit);

  std::size_t size() const { return slots_.size(); }
  const std::string& parameter_name(std::size_t i) const { return slots_[i].name; }
  const at::Tensor& parameter(std::size_t i) const { return slots_[i].parameter; }
  at::IntArrayRef full_sizes(std::size_t i) const { return slots_[i].sizes; }
  const at::Tensor& shard_view(std::size_t i) const { return slots_[i].shard; }
  Piece piece(std::size_t i) const { return layout_.piece(i, ranks_.shard.rank()); }
  const FlatLayout& layout() const { return layout_; }
  const at::Tensor& flat_shard() const { return shard_; }
  // The gradients of all parameters, as they lie beside each other; undefined when they do not.
  at::Tensor flat_gradient() const;
  // Copies from the full parameter, of any dtype and on any device, into this rank's piece. REQUIRES: resharded.
  void load_full(std::size_t i, const at::Tensor& full);
  // Copies what a piece of the parameter, from element `begin` on, has in common with this rank's.
  void load_piece(std::size_t i, int64_t begin, const at::Tensor& piece);
  // Copies what was written to the full parameters into this rank's piece. REQUIRES: unsharded().
  void write_back();
  void add_usage(Usage& usage) const;
  // Brings the ledger up to date, if somebody watches it. From then on it follows by itself, but for pieces of
  // gradients that the user drops.
  void account() noexcept;

 private:
  enum class State : uint8_t { kSharded, kShapes, kGathering, kUnsharded };
  struct Slot {
    std::string name;
    at::Tensor parameter;
    std::vector<int64_t> sizes, strides;
    at::Tensor full, shard;  // views of the two buffers
    at::Tensor before;       // the gradient from before this pass
    uint32_t version = 0;    // of the parameter, when it was unsharded
    bool seen = false;       // had a gradient since the last reduction
    bool waiting = false;    // has still to bring one in this pass
  };

  std::vector<FlatItem> items(const Options& options) const;
  void make_views();
  void take_over(Slot& slot, std::size_t index);
  void initialise(const Options& options);
  void adopt_replaced(Slot& slot, std::size_t index);
  void stash_gradient(Slot& slot, const Piece& piece);
  std::optional<c10::ScalarType> narrow_gradient() const;
  bool scales_on_the_way() const;
  comm::Reduction on_the_way() const;
  void scale(at::Tensor& piece) const;
  Held held() const;
  std::string named(const Slot& slot) const;

  const std::string unit_;
  const std::string resharded_text_;
  Ranks ranks_;
  const Options& options_;  // of the Sharded that owns this group
  Ledger& ledger_;          // likewise
  Held held_;               // as the ledger knows it
  std::vector<Slot> slots_;
  c10::ScalarType shard_dtype_, full_dtype_, gradient_dtype_;
  c10::Device device_;
  FlatLayout layout_;
  at::Tensor shard_;
  FlatBuffer full_;
  FullGradient gradient_;
  at::Tensor arriving_;  // this rank's piece, while the reduction runs
  at::Tensor reduced_;   // of this pass, before hand_over()
  c10::weak_intrusive_ptr<c10::StorageImpl> handed_over_;
  comm::Work gather_, reduction_;
  State state_ = State::kSharded;
  bool open_ = false;
  bool reducing_ = false;
  int64_t pending_ = 0;
  int64_t gathers_ = 0, scatters_ = 0;
  Bytes copied_;
};

}  // namespace neap::shard
