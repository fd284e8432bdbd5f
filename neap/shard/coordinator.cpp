#include "neap/shard/coordinator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "neap/autograd/backward_reads.h"
#include "neap/base/error.h"
#include "neap/base/error_boundary.h"

namespace neap::shard {

namespace {

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::weak_ptr<Coordinator> coordinator, Unit& unit, FlatGroup& group, std::size_t index)
      : coordinator_(std::move(coordinator)), unit_(unit), group_(group), index_(index) {}

  void operator()(const at::Tensor& /*parameter*/) override {
    const auto coordinator = coordinator_.lock();
    if (coordinator) at_error_boundary([&] { coordinator->gradient_arrived(unit_, group_, index_); });
  }

 private:
  const std::weak_ptr<Coordinator> coordinator_;
  Unit& unit_;
  FlatGroup& group_;
  const std::size_t index_;
};

constexpr std::size_t kUnreadCalls = 1024;

// Gradients that this pass has still to bring.
int64_t pending(const Unit& unit) {
  int64_t count = 0;
  for (const auto& group : unit.groups) count += group->pending();
  return count;
}

std::size_t trainable(const Unit& unit) {
  std::size_t count = 0;
  for (const auto& group : unit.groups) {
    for (std::size_t i = 0; i < group->size(); ++i) count += group->parameter(i).requires_grad() ? 1 : 0;
  }
  return count;
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

// Held by the graph task in the form of a callback. Destroyed without having run, it tells of a failed pass.
struct Coordinator::Pass {
  ~Pass() {
    if (const auto coordinator = owner.lock()) coordinator->give_up_pass(number);
  }

  const std::weak_ptr<Coordinator> owner;
  const uint64_t number;
};

Coordinator::Coordinator(Ranks ranks, Options options)
    : ranks_(ranks), options_(std::make_unique<const Options>(std::move(options))) {}

Coordinator::~Coordinator() = default;

Unit& Coordinator::add_unit(std::string name, bool root) {
  auto unit = std::make_unique<Unit>();
  unit->name = std::move(name);
  unit->index = static_cast<int>(units_.size());
  unit->root = root;
  units_.push_back(std::move(unit));
  return *units_.back();
}

void Coordinator::watch_gradients() {
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) {
      for (std::size_t i = 0; i < group->size(); ++i) {
        torch::autograd::impl::set_post_acc_grad_hooks(
            group->parameter(i), std::make_unique<GradientHook>(weak_from_this(), *unit, *group, i));
      }
    }
  }
}

bool Coordinator::watched(const at::Tensor& parameter) {
  return torch::autograd::impl::get_autograd_meta(parameter) != nullptr &&  // else torch may not be asked: frozen
         dynamic_cast<GradientHook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get()) != nullptr;
}

void Coordinator::unwatch_gradients() noexcept {
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) {
      for (std::size_t i = 0; i < group->size(); ++i) {
        torch::autograd::impl::set_post_acc_grad_hooks(group->parameter(i), nullptr);
      }
    }
  }
}

// ---- parameters

void Coordinator::count_live(Unit& unit, bool live) {
  if (std::exchange(unit.live, live) == live || unit.root || unit.groups.empty()) return;
  live_ += live ? 1 : -1;
  live_peak_ = std::max(live_peak_, live_);
}

void Coordinator::begin_unshard(Unit& unit) {
  if (unit.live) return;
  count_live(unit, true);
  try {
    for (const auto& group : unit.groups) group->begin_unshard();
  } catch (...) {
    reshard_quietly(unit);
    throw;
  }
}

void Coordinator::unshard(Unit& unit) {
  if (prefetched_ != nullptr && prefetched_ != &unit) drop_prefetched();
  prefetched_ = nullptr;
  begin_unshard(unit);
  try {
    for (const auto& group : unit.groups) group->finish_unshard();
  } catch (...) {
    if (idle(unit)) reshard_quietly(unit);
    throw;
  }
}

void Coordinator::reshard(Unit& unit) {
  count_live(unit, false);
  for (const auto& group : unit.groups) group->reshard();
}

void Coordinator::reshard_quietly(Unit& unit) noexcept {
  count_live(unit, false);
  for (const auto& group : unit.groups) group->reshard_quietly();
}

// One unit ahead, so that with the one that computes two are live.
void Coordinator::prefetch(int index) {
  if (!options_->prefetch || index == UnitOrder::kUnknown) return;
  Unit& next = *units_[static_cast<std::size_t>(index)];
  if (next.root || next.live || (options_->stage == Stage::kParameters && live_ > 1)) return;
  begin_unshard(next);
  prefetched_ = &next;
}

void Coordinator::drop_prefetched() {
  if (Unit* unit = std::exchange(prefetched_, nullptr); unit != nullptr && idle(*unit)) reshard_quietly(*unit);
}

// ---- forward

void Coordinator::run_forward(Unit& unit, const autograd::UnitCall& call, c10::function_ref<void()> body) {
  bool entered = false;
  bool unread = false;
  try {
    enter(unit);
    entered = true;
    const autograd::ListenForReads reads;
    body();
    unread = reads.none(call.unit);
  } catch (...) {
    if (entered) --unit.depth;
    give_up_forward();
    throw;
  }
  if (unread && c10::GradMode::is_enabled()) {
    unit.unread_calls.insert(call.id);
    if (unit.unread_calls.size() > kUnreadCalls) unit.unread_calls.erase(unit.unread_calls.begin());
  }
  leave(unit, unread);
}

void Coordinator::enter(Unit& unit) {
  give_up_stale_pass();
  if (unit.depth == 0) {
    if (unit.root && !in_backward()) forward_order_.restart();
    const bool root_is_there =
        unit.root || std::ranges::all_of(root().groups, [](const auto& group) { return group->unsharded(); });
    NEAP_CHECK(root_is_there, "[shard] expected the forward of unit '", unit.name,
               "' inside that of the model; found it outside, so parameters that belong to no unit, such as '",
               root().groups.front()->parameter_name(0),
               "', are in pieces; wrap the forward: sharded.run([&] { return model->forward(x); }), or in Python call "
               "model(x)");
    unshard(unit);
    if (!in_backward()) prefetch(forward_order_.advance(unit.index));
  }
  ++unit.depth;
}

void Coordinator::leave(Unit& unit, bool unread) {
  if (!unread && kept_for_backward(unit)) unit.kept = true;
  if (--unit.depth > 0) return;
  if (unit.root && !c10::GradMode::is_enabled()) drop_prefetched();
  if (idle(unit)) reshard(unit);
}

// The unit that backward begins with would be gathered again at once, unless another one runs forward in between.
bool Coordinator::kept_for_backward(const Unit& unit) const {
  if (!c10::GradMode::is_enabled() || in_backward()) return false;
  if (unit.root || options_->stage != Stage::kParameters) return true;
  return options_->prefetch && &unit == first_in_backward_ && prefetched_ == nullptr;
}

// What was kept for the backward of a forward that has failed goes too; a unit that is needed after all is gathered
// again.
void Coordinator::give_up_forward() noexcept {
  if (in_backward()) return;
  prefetched_ = nullptr;
  for (const auto& unit : units_) {
    unit->kept = false;
    if (idle(*unit)) reshard_quietly(*unit);
  }
}

// ---- backward

void Coordinator::before_backward(Unit& unit, const autograd::UnitCall& call) {
  begin_pass();
  for (Unit* other : open_) {
    if (other != &unit) other->interleaved = true;
  }
  if (unit.open_calls++ == 0 && !unit.root) open_.push_back(&unit);
  if (ahead_of_ != &unit) ahead_of_ = nullptr;
  const bool reads = !unit.unread_calls.contains(call.id);
  if (reads || unit.live) {
    unshard(unit);
  } else {
    for (const auto& group : unit.groups) group->show_full_shape();
  }
  for (const auto& group : unit.groups) {
    check_watched(*group);
    group->open_gradients(/*single_pass=*/pass_syncs_ && !accumulates_);
  }
  if (!reads) return;  // the order is that of units to be gathered
  if (!unit.root && !std::exchange(pass_has_begun_a_unit_, true)) first_in_backward_ = &unit;
  prefetch_in_backward(unit, backward_order_.advance(unit.index));
}

// The first half of a unit's backward has the reduction of the last unit under it, the second half the gather of the
// next one, so that a full gradient and full parameters make room for each other. Gradients may come at other times on
// other ranks, which is the same to all as long as nothing else is begun meanwhile.
void Coordinator::prefetch_in_backward(Unit& unit, int next) {
  const bool in_half = trainable(unit) > 1 && !unit.root && !unit.interleaved;  // the same on every rank
  if (!in_half || options_->stage != Stage::kParameters) return prefetch(next);
  ahead_of_ = &unit;
  ahead_ = next;
  half_ = pending(unit) / 2;
}

void Coordinator::begin_ahead() {
  ahead_of_ = nullptr;
  if (!options_->prefetch || ahead_ == UnitOrder::kUnknown) return;
  advance_reductions();
  prefetch(ahead_);
}

// Torch has room for one such hook on a parameter. Without ours a gradient would be lost.
void Coordinator::check_watched(const FlatGroup& group) {
  for (std::size_t i = 0; i < group.size(); ++i) {
    NEAP_CHECK(watched(group.parameter(i)), "[shard] expected the post-accumulate hook of '", group.parameter_name(i),
               "' to be the one that sharding set; found that it was replaced; use Tensor::register_hook() instead");
  }
}

void Coordinator::after_backward(Unit& unit) {
  if (unit.open_calls == 0) return;  // of a pass that was given up
  if (--unit.open_calls == 0) std::erase(open_, &unit);
  if (ahead_of_ == &unit) begin_ahead();
  finish_if_complete(unit);
}

void Coordinator::gradient_arrived(Unit& unit, FlatGroup& group, std::size_t index) {
  group.gradient_arrived(index);
  if (ahead_of_ == &unit && pending(unit) <= half_) begin_ahead();
  finish_if_complete(unit);
}

// The last node of the unit's last call has run, and the last gradient is where it belongs.
void Coordinator::finish_if_complete(Unit& unit) {
  if (unit.open_calls == 0 && pending(unit) == 0) finish_unit(unit);
}

void Coordinator::finish_unit(Unit& unit) {
  if (pass_syncs_ && options_->stage != Stage::kOptimizer) {
    begin_reduce(unit);
  } else {
    for (const auto& group : unit.groups) group->hold_gradients();
  }
  unit.kept = false;
  if (idle(unit)) reshard(unit);
}

// One unit's reduction runs under the backward of the next one.
void Coordinator::begin_reduce(Unit& unit) {
  const auto has_gradients = [](const auto& group) { return group->gradients_open() || group->gradients_held(); };
  if (std::ranges::none_of(unit.groups, has_gradients)) return;
  advance_reductions();
  for (const auto& group : unit.groups) {
    if (has_gradients(group)) group->begin_reduce();
  }
  reducing_ = &unit;
  reduced_in_pass_ = true;
  if (!options_->prefetch) finish_reduce();
}

// What was scattered goes on to the replicas, in whose group of ranks it keeps no scatter waiting.
void Coordinator::advance_reductions() {
  if (Unit* unit = std::exchange(averaging_, nullptr); unit != nullptr) {
    for (const auto& group : unit->groups) group->finish_reduce();
  }
  averaging_ = std::exchange(reducing_, nullptr);
  if (averaging_ == nullptr) return;
  for (const auto& group : averaging_->groups) group->begin_replicas();
}

void Coordinator::finish_reduce() {
  advance_reductions();
  advance_reductions();
}

void Coordinator::begin_pass() {
  uint64_t number = 0;
  {
    const MutexLock lock(pass_mutex_);
    if (open_pass_ != 0) return;  // also for passes inside of this one
    number = open_pass_ = ++last_pass_;
  }
  const std::shared_ptr<Pass> pass(new Pass{weak_from_this(), number});
  torch::autograd::Engine::get_default_engine().queue_callback([pass] {
    const auto coordinator = pass->owner.lock();
    if (coordinator) at_error_boundary([&] { coordinator->end_pass(pass->number); });
  });
  pass_syncs_ = sync_;
  backward_order_.restart();
  reduced_in_pass_ = pass_has_begun_a_unit_ = false;
  ahead_of_ = nullptr;
}

void Coordinator::end_pass(uint64_t number) {
  try {
    finish_pass();
  } catch (...) {
    give_up_pass(number);
    throw;
  }
  const MutexLock lock(pass_mutex_);
  open_pass_ = 0;
}

void Coordinator::finish_pass() {
  open_.clear();
  // Units with a parameter whose gradient did not come although its node was to run.
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    (*unit)->open_calls = 0;
    if (std::ranges::any_of((*unit)->groups, [](const auto& group) { return group->gradients_open(); })) {
      finish_unit(**unit);
    }
  }
  if (pass_syncs_) {
    for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) begin_reduce(**unit);
  }
  finish_reduce();
  accumulates_ = !pass_syncs_;
  hand_over_gradients();
  drop_prefetched();
  for (const auto& unit : units_) {
    unit->kept = false;
    if (idle(*unit) && unit->live) reshard(*unit);
  }
  forward_order_.restart();
}

// A parameter that no rank used keeps an undefined gradient, which optimizers skip; one that some rank used has one on
// every rank, or the ranks' pieces of it would part ways.
void Coordinator::hand_over_gradients() {
  std::vector<int32_t> flags;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) group->append_flags(flags);
  }
  if (reduced_in_pass_ && ranks_.count() > 1) {
    const auto on_host = at::from_blob(flags.data(), {static_cast<int64_t>(flags.size())}, at::kInt);
    const auto first = std::ranges::find_if(units_, [](const auto& unit) { return !unit->groups.empty(); });
    const auto shared = on_host.to((*first)->groups.front()->flat_shard().device(), /*non_blocking=*/false,
                                   /*copy=*/true);
    for (comm::Group* ranks : {&ranks_.shard, &ranks_.replicate}) {
      if (ranks->size() > 1) ranks->all_reduce(shared, {.op = comm::ReduceOp::kMax}, "used parameters").wait();
    }
    on_host.copy_(shared);
  }
  const int32_t* next = flags.data();
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) group->hand_over(next);
  }
}

void Coordinator::abort_pass() noexcept {
  prefetched_ = reducing_ = averaging_ = nullptr;
  open_.clear();
  for (const auto& unit : units_) {
    unit->open_calls = 0;
    unit->kept = false;
    for (const auto& group : unit->groups) group->drop_gradients();
    if (idle(*unit)) reshard_quietly(*unit);
  }
  forward_order_.restart();
}

// Once for each pass that has failed: by whoever lets go of it, maybe late and on a device's thread, or by the next
// step.
void Coordinator::give_up_pass(uint64_t number) noexcept {
  const MutexLock lock(pass_mutex_);
  if (open_pass_ == 0 || open_pass_ != number) return;
  open_pass_ = 0;
  abort_pass();
}

void Coordinator::give_up_stale_pass() noexcept {
  if (in_backward()) return;
  const MutexLock lock(pass_mutex_);
  if (std::exchange(open_pass_, 0) != 0) abort_pass();
}

// ---- at the user's wish

void Coordinator::unshard_all() {
  for (const auto& unit : units_) {
    unit->pinned = true;
    unshard(*unit);
  }
}

void Coordinator::reshard_all() {
  for (const auto& unit : units_) {
    unit->pinned = unit->kept = false;
    if (idle(*unit)) reshard(*unit);
  }
}

void Coordinator::reshard_all_quietly() noexcept {
  for (const auto& unit : units_) {
    unit->pinned = unit->kept = false;
    if (idle(*unit)) reshard_quietly(*unit);
  }
}

void Coordinator::come_to_rest(const char* what) {
  give_up_stale_pass();
  const bool busy = in_backward() || std::ranges::any_of(units_, [](const auto& unit) { return unit->depth > 0; });
  NEAP_CHECK(!busy, "[shard] expected ", what, " between steps; found it inside a forward or backward pass");
  drop_prefetched();
  reshard_all();
}

Usage Coordinator::usage() {
  give_up_stale_pass();
  Usage usage;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) group->add_usage(usage);
  }
  usage.live_units = live_;
  usage.live_units_peak = live_peak_;
  return usage;
}

void Coordinator::account() {
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) group->account();
  }
}

// ---- hook

void ShardHook::around_forward(const autograd::UnitCall& call, c10::function_ref<void()> body) {
  const auto coordinator = coordinator_.lock();
  if (coordinator == nullptr) return body();
  coordinator->run_forward(unit_, call, body);
}

void ShardHook::before_backward(const autograd::UnitCall& call) {
  if (const auto coordinator = coordinator_.lock()) coordinator->before_backward(unit_, call);
}

void ShardHook::after_backward(const autograd::UnitCall& /*call*/) {
  if (const auto coordinator = coordinator_.lock()) coordinator->after_backward(unit_);
}

}  // namespace neap::shard
