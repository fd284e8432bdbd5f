// When units are unsharded, resharded and reduced; internal to the layer.
//
// One per sharded model. Unit hooks and gradient hooks report what happens; the coordinator decides, from that alone
// and so alike on every rank, which collectives to start. One thread at a time: the one that runs forward, and in
// backward the one that runs the node, which on a device is autograd's thread of that device. A pass that failed may be
// let go of while the next step begins; that alone is behind a lock.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "neap/autograd/hook_point.h"
#include "neap/base/mutex.h"
#include "neap/shard/flat_group.h"
#include "neap/shard/options.h"
#include "neap/shard/unit_order.h"

namespace neap::shard {

struct Unit {
  std::string name;
  int index = 0;
  bool root = false;
  std::vector<std::unique_ptr<FlatGroup>> groups;

  int depth = 0;        // of forward calls under way
  int open_calls = 0;   // between before_backward() and after_backward()
  bool kept = false;    // stays unsharded after its forward, for its backward
  bool pinned = false;  // unsharded at the user's wish
  bool live = false;    // unsharded or being gathered
  // Calls whose backward reads no parameters. Of a multitude without a backward the oldest are forgotten: they get
  // some.
  std::set<uint64_t> unread_calls;
  bool interleaved = false;  // another unit has begun backward before this one was through with its own
};

class Coordinator : public std::enable_shared_from_this<Coordinator> {
 public:
  Coordinator(Ranks ranks, Options options);
  ~Coordinator();

  // In the order of the model; the root, which may be without groups, last.
  Unit& add_unit(std::string name, bool root);

  // Gradient hooks on every parameter. Once, when a shared_ptr owns this.
  void watch_gradients();
  void unwatch_gradients() noexcept;
  // A coordinator, this or another one, has its hook on the parameter.
  static bool watched(const at::Tensor& parameter);

  // Events.
  void run_forward(Unit& unit, const autograd::UnitCall& call, c10::function_ref<void()> body);
  void before_backward(Unit& unit, const autograd::UnitCall& call);
  void after_backward(Unit& unit);
  void gradient_arrived(Unit& unit, FlatGroup& group, std::size_t index);

  // At the user's wish.
  void unshard_all();
  void reshard_all();
  void reshard_all_quietly() noexcept;
  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }
  // Before anything that looks at shards. UserError inside a forward or backward pass; units that were kept for a
  // backward that never came are resharded.
  void come_to_rest(const char* what);

  std::vector<std::unique_ptr<Unit>>& units() { return units_; }
  Unit& root() { return *units_.back(); }
  const Options& options() const { return *options_; }
  const Ranks& ranks() const { return ranks_; }
  Usage usage();
  void reset_peak() { live_peak_ = live_; }
  Ledger& ledger() { return *ledger_; }
  void account();

 private:
  struct Pass;

  void enter(Unit& unit);
  void leave(Unit& unit, bool unread);
  void give_up_forward() noexcept;
  void begin_unshard(Unit& unit);
  void unshard(Unit& unit);
  void reshard(Unit& unit);
  void reshard_quietly(Unit& unit) noexcept;
  bool kept_for_backward(const Unit& unit) const;
  bool idle(const Unit& unit) const { return unit.depth == 0 && unit.open_calls == 0 && !unit.kept && !unit.pinned; }
  void prefetch(int unit);
  void prefetch_in_backward(Unit& unit, int next);
  void begin_ahead();
  void drop_prefetched();
  void count_live(Unit& unit, bool live);

  static void check_watched(const FlatGroup& group);
  void begin_pass();
  void end_pass(uint64_t number);
  void finish_pass();
  void give_up_pass(uint64_t number) noexcept NEAP_EXCLUDES(pass_mutex_);
  void give_up_stale_pass() noexcept NEAP_EXCLUDES(pass_mutex_);
  void abort_pass() noexcept;
  void finish_if_complete(Unit& unit);
  void finish_unit(Unit& unit);
  void begin_reduce(Unit& unit);
  void advance_reductions();
  void finish_reduce();
  void hand_over_gradients();

  Ranks ranks_;
  std::unique_ptr<const Options> options_;                             // groups refer to it
  const std::unique_ptr<Ledger> ledger_ = std::make_unique<Ledger>();  // and to it
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Unit*> open_;  // in backward now, without the root: one as a rule
  UnitOrder forward_order_, backward_order_;
  Mutex pass_mutex_;
  uint64_t last_pass_ NEAP_GUARDED_BY(pass_mutex_) = 0;
  uint64_t open_pass_ NEAP_GUARDED_BY(pass_mutex_) = 0;  // 0: none
  Unit* prefetched_ = nullptr;                           // being gathered for a unit that has not begun
  Unit* reducing_ = nullptr;                             // its gradients are being scattered
  Unit* averaging_ = nullptr;                            // and here added up over replicas
  const Unit* first_in_backward_ = nullptr;              // of the last pass to read parameters, without the root
  const Unit* ahead_of_ = nullptr;                       // in the middle of its backward ahead_ is to be gathered
  int ahead_ = UnitOrder::kUnknown;
  int64_t half_ = 0;  // of the gradients that ahead_of_ waits for
  bool pass_has_begun_a_unit_ = false;
  bool sync_ = true;
  bool pass_syncs_ = true;    // as it was when the pass began
  bool accumulates_ = false;  // a pass before this one has left its gradients for this one's reduction
  bool reduced_in_pass_ = false;
  int64_t live_ = 0, live_peak_ = 0;
};

// At a unit's hook point.
class ShardHook final : public autograd::UnitHook {
 public:
  ShardHook(std::weak_ptr<Coordinator> coordinator, Unit& unit) : coordinator_(std::move(coordinator)), unit_(unit) {}

  void around_forward(const autograd::UnitCall& call, c10::function_ref<void()> body) override;
  void before_backward(const autograd::UnitCall& call) override;
  void after_backward(const autograd::UnitCall& call) override;

 private:
  const std::weak_ptr<Coordinator> coordinator_;
  Unit& unit_;  // lives as long as the coordinator
};

}  // namespace neap::shard
