#include "neap/shard/flat_group.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "neap/autograd/graph_task.h"
#include "neap/autograd/resident_storages.h"
#include "neap/base/error.h"
#include "neap/shard/memory_view.h"

namespace neap::shard {

namespace impl = torch::autograd::impl;

namespace {

constexpr int64_t kAlignmentBytes = 64;  // a cache line, and the widest vector

c10::ScalarType pick(std::optional<c10::ScalarType> wanted, c10::ScalarType own) {
  return wanted && c10::isFloatingType(own) ? *wanted : own;
}

// Elements, so that starts are aligned in every dtype that the group's buffers have.
int64_t alignment(std::initializer_list<c10::ScalarType> dtypes) {
  std::size_t smallest = kAlignmentBytes;
  for (const c10::ScalarType dtype : dtypes) smallest = std::min(smallest, c10::elementSize(dtype));
  return kAlignmentBytes / static_cast<int64_t>(smallest);
}

c10::Device device_for(const at::Tensor& parameter, const Options& options) {
  return parameter.is_meta() && options.device ? *options.device : parameter.device();
}

}  // namespace

FlatGroup::FlatGroup(std::string unit, std::vector<NamedParameter> parameters, Ranks ranks, const Options& options,
                     Ledger& ledger)
    : unit_(std::move(unit)),
      resharded_text_("[shard] '" + unit_ +
                      "' is resharded: its full parameters can be read only while the unit runs or inside "
                      "Sharded::with_full_parameters(); what was found is a read or write from outside, say through a "
                      "view or a graph that was kept; call the unit through its hooks, or unshard it first"),
      ranks_(ranks),
      options_(options),
      ledger_(ledger),
      slots_([&] {
        std::vector<Slot> slots;
        for (NamedParameter& parameter : parameters) {
          Slot slot;
          slot.name = std::move(parameter.name);
          slot.parameter = std::move(parameter.tensor);
          slot.sizes = slot.parameter.sizes().vec();
          slot.strides = slot.parameter.strides().vec();
          slots.push_back(std::move(slot));
        }
        return slots;
      }()),
      shard_dtype_(slots_.front().parameter.scalar_type()),
      full_dtype_(pick(options.param_dtype, shard_dtype_)),
      gradient_dtype_(pick(options.reduce_dtype, full_dtype_)),
      device_(device_for(slots_.front().parameter, options)),
      layout_(items(options), ranks.shard.size(), alignment({shard_dtype_, full_dtype_, gradient_dtype_})),
      shard_(at::zeros({layout_.shard_numel()}, at::TensorOptions().dtype(shard_dtype_).device(device_))),
      // One rank holds everything: the full parameters are the shard.
      full_(ranks.shard.size() == 1 && full_dtype_ == shard_dtype_
                ? FlatBuffer(shard_)
                : FlatBuffer(layout_.total(), full_dtype_, device_, resharded_text_)),
      gradient_(layout_.total(), gradient_dtype_, narrow_gradient(), device_,
                "[shard] '" + unit_ + "' has no full gradients outside of backward"),
      handed_over_(c10::intrusive_ptr<c10::StorageImpl>()) {
  const at::NoGradGuard no_grad;
  make_views();
  autograd::ResidentStorages::of_process().add(full_.tensor());
  if (slots_.front().parameter.is_meta()) initialise(options);
  for (std::size_t i = 0; i < slots_.size(); ++i) take_over(slots_[i], i);
  account();
}

FlatGroup::~FlatGroup() {
  drop_gradients();
  reshard_quietly();
  autograd::ResidentStorages::of_process().remove(full_.tensor());
  ledger_.change(held_, {});
}

Held FlatGroup::held() const {
  Held held;
  held.parameters = Bytes(static_cast<int64_t>(shard_.storage().nbytes())) + full_.bytes();
  held.gradients = gradient_.bytes();
  for (const at::Tensor* piece : {&arriving_, &reduced_}) {
    if (piece->defined()) held.gradients += Bytes(static_cast<int64_t>(piece->nbytes()));
  }
  if (const auto storage = handed_over_.lock()) held.gradients += Bytes(static_cast<int64_t>(storage->nbytes()));
  return held;
}

void FlatGroup::account() noexcept {
  if (!ledger_.watched()) return;
  const Held now = held();
  ledger_.change(held_, now);
  held_ = now;
}

std::string FlatGroup::named(const Slot& slot) const { return internal::concat("'", slot.name, "'"); }

void FlatGroup::check(const NamedParameter& parameter, const Options& options) {
  const auto& [name, p] = parameter;
  NEAP_CHECK(p.is_leaf(), "[shard] expected parameter '", name,
             "' to be a leaf; found the result of an operator; register a leaf");
  NEAP_CHECK(p.layout() == at::kStrided && p.is_non_overlapping_and_dense(), "[shard] expected parameter '", name,
             "' to be dense; found layout ", p.layout(), "; make it contiguous");
  NEAP_CHECK(!p.grad().defined(), "[shard] expected no gradients when a model is sharded; found one at '", name,
             "'; call zero_grad() first");
  NEAP_CHECK(!p.is_meta() || options.device,
             "[shard] expected Options::device for parameters on the meta device, such "
             "as '",
             name, "'; found none; set it to the device to train on");
  NEAP_CHECK(!p.requires_grad() || impl::try_get_grad_accumulator(p) == nullptr,
             "[shard] expected no graph to be alive when a model is sharded; found one that uses '", name,
             "'; let go of losses and outputs first");
  if (!options.block_of || p.numel() == 0) return;
  const int64_t block = options.block_of(name, p.sizes());
  NEAP_CHECK(block >= 1 && p.numel() % block == 0, "[shard] expected blocks that divide the ", p.numel(),
             " elements of '", name, "'; Options::block_of returned ", block);
}

std::vector<FlatItem> FlatGroup::items(const Options& options) const {
  std::vector<FlatItem> items;
  for (const Slot& slot : slots_) {
    FlatItem item{.numel = slot.parameter.numel()};
    if (options.block_of && item.numel > 0) item.block = options.block_of(slot.name, slot.sizes);
    items.push_back(item);
  }
  return items;
}

void FlatGroup::make_views() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const Piece mine = piece(i);
    slot.full = full_.view(layout_.offset(i), slot.sizes, slot.strides);
    gradient_.add_view(layout_.offset(i), slot.sizes, slot.strides);
    slot.shard = shard_.narrow(0, mine.shard_offset, mine.numel());
  }
}

// Whole parameters of one group at a time, for models that were made on the meta device. Not in the unsharded buffer,
// whose dtype may be a narrower one.
void FlatGroup::initialise(const Options& options) {
  if (!options.initialize) return;
  const at::Tensor whole = at::zeros({layout_.total()}, shard_.options());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    options.initialize(slots_[i].name, whole.as_strided(slots_[i].sizes, slots_[i].strides, layout_.offset(i)));
  }
  shard_.copy_(whole.narrow(0, ranks_.shard.rank() * layout_.shard_numel(), layout_.shard_numel()));
}

void FlatGroup::take_over(Slot& slot, std::size_t index) {
  const Piece mine = piece(index);
  if (!slot.parameter.is_meta() && mine.numel() > 0) {
    slot.shard.copy_(in_memory_order(slot.parameter).narrow(0, mine.begin, mine.numel()));
  }
  look_at(slot.parameter, slot.shard);  // the old storage dies with its last owner
}

// ---- parameters

void FlatGroup::begin_unshard() {
  if (state_ == State::kShapes) reshard_quietly();
  if (state_ != State::kSharded) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) adopt_replaced(slots_[i], i);
  ledger_.look();
  full_.allocate();
  ++gathers_;
  const at::Tensor& full = full_.tensor();
  try {
    if (full.storage().is_alias_of(shard_.storage())) {
      gather_ = comm::Work();
    } else if (full_dtype_ == shard_dtype_) {
      gather_ = ranks_.shard.all_gather(full, shard_, unit_);
    } else {
      full.narrow(0, ranks_.shard.rank() * layout_.shard_numel(), layout_.shard_numel()).copy_(shard_);
      copied_ += Bytes(static_cast<int64_t>(shard_.nbytes()));
      gather_ = ranks_.shard.all_gather(full, unit_);
    }
  } catch (...) {
    full_.release(resharded_text_);
    throw;
  }
  state_ = State::kGathering;
  account();
}

void FlatGroup::finish_unshard() {
  if (state_ == State::kUnsharded) return;
  begin_unshard();
  gather_.wait();
  for (Slot& slot : slots_) {
    look_at(slot.parameter, slot.full);
    slot.version = impl::version_counter(slot.parameter).current_version();
  }
  state_ = State::kUnsharded;
}

void FlatGroup::reshard() {
  const Slot* written = nullptr;
  if (state_ == State::kUnsharded && !full_.tensor().storage().is_alias_of(shard_.storage())) {
    for (const Slot& slot : slots_) {
      const bool replaced = !slot.parameter.storage().is_alias_of(full_.tensor().storage());
      if (replaced || impl::version_counter(slot.parameter).current_version() != slot.version) written = &slot;
    }
  }
  reshard_quietly();
  NEAP_CHECK(
      written == nullptr, "[shard] expected the full parameters of '", unit_,
      "' to stay as they are while they are unsharded; found that ", named(*written),
      " was written or replaced, which its shard does not know; write inside Sharded::with_full_parameters(), with "
      "write_back");
}

void FlatGroup::show_full_shape() {
  if (state_ != State::kSharded) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) adopt_replaced(slots_[i], i);
  for (Slot& slot : slots_) look_at(slot.parameter, slot.full);
  state_ = State::kShapes;
}

void FlatGroup::reshard_quietly() noexcept {
  if (state_ == State::kSharded) return;
  if (state_ != State::kGathering) {
    for (Slot& slot : slots_) look_at(slot.parameter, slot.shard);
  } else {
    try {
      gather_.wait();  // it writes to the memory that goes now
    } catch (...) {    // NOLINT(bugprone-empty-catch): whoever started the next collective hears of it
    }
  }
  gather_ = comm::Work();
  ledger_.look();
  full_.release(resharded_text_);
  state_ = State::kSharded;
  account();
}

// A parameter whose data was replaced while it was a shard: by load_state_dict in its assigning form, by set_data().
void FlatGroup::adopt_replaced(Slot& slot, std::size_t index) {
  const at::Tensor& p = slot.parameter;
  if (p.storage().unsafeGetStorageImpl() == shard_.storage().unsafeGetStorageImpl() &&
      p.storage_offset() == slot.shard.storage_offset() && p.numel() == slot.shard.numel()) {
    return;
  }
  const bool kept_kind = p.scalar_type() == shard_dtype_ && p.device() == device_ && p.layout() == at::kStrided;
  const Piece mine = piece(index);
  NEAP_CHECK(kept_kind && (p.sizes() == slot.shard.sizes() || p.sizes() == at::IntArrayRef(slot.sizes)),
             "[shard] expected the data of ", named(slot), " to be this rank's piece, ", shard_dtype_, " ",
             slot.shard.sizes(), " on ", device_, ", or the full ", at::IntArrayRef(slot.sizes), "; found ",
             p.scalar_type(), " ", p.sizes(), " on ", p.device(),
             "; convert or move a model before fully_shard(), or load values with Sharded::load_full_state()");
  const at::Tensor found = p.detach();
  if (found.sizes() == slot.shard.sizes()) {
    slot.shard.copy_(found);
  } else {
    slot.shard.copy_(
        found.as_strided(slot.sizes, found.strides()).contiguous().view(-1).narrow(0, mine.begin, mine.numel()));
  }
  copied_ += Bytes(static_cast<int64_t>(slot.shard.nbytes()));
  look_at(p, slot.shard);
}

// ---- gradients

void FlatGroup::stash_gradient(Slot& slot, const Piece& mine) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined()) return;
  NEAP_CHECK(grad.dim() == 1 && grad.numel() == mine.numel(), "[shard] expected the gradient of ", named(slot),
             " to be this rank's piece of ", mine.numel(), " elements; found ", grad.sizes(),
             "; drop it with zero_grad()");
  slot.before = std::exchange(grad, at::Tensor());
}

void FlatGroup::open_gradients(bool single_pass) {
  if (open_) return;
  NEAP_ASSERT(unsharded() || state_ == State::kShapes);
  const bool trainable = std::ranges::any_of(slots_, [](const Slot& slot) { return slot.parameter.requires_grad(); });
  if (!trainable) return;
  const at::NoGradGuard no_grad;
  if (reducing_) finish_reduce();
  if (!gradient_.exists()) {
    ledger_.look();
    gradient_.open(single_pass);
    account();
  }
  pending_ = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.waiting = false;
    if (!slot.parameter.requires_grad()) continue;
    stash_gradient(slot, piece(i));
    slot.parameter.mutable_grad() = gradient_.target(i);
    const auto accumulator = impl::try_get_grad_accumulator(slot.parameter);
    slot.waiting = accumulator != nullptr && autograd::runs_in_current_pass(accumulator.get());
    pending_ += slot.waiting ? 1 : 0;
  }
  open_ = true;
}

void FlatGroup::gradient_arrived(std::size_t index) {
  Slot& slot = slots_[index];
  NEAP_CHECK(open_, "[shard] expected the gradient of ", named(slot), " while its unit '", unit_,
             "' runs backward; found one outside, so the parameter was used without the unit's hooks; call the unit "
             "through its hook point, Sharded::run() or Sharded::unit()");
  const at::NoGradGuard no_grad;
  if (gradient_.bytes().count == 0) ledger_.look();
  copied_ += gradient_.take_in(index, slot.parameter.mutable_grad());
  account();
  slot.seen = true;
  if (std::exchange(slot.waiting, false)) --pending_;
}

void FlatGroup::hold_gradients() {
  if (!open_) return;
  for (Slot& slot : slots_) {
    if (slot.parameter.requires_grad()) slot.parameter.mutable_grad().reset();
  }
  open_ = false;
  pending_ = 0;
}

void FlatGroup::begin_reduce() {
  hold_gradients();
  const at::NoGradGuard no_grad;
  ++scatters_;
  ledger_.look();
  if (ranks_.shard.size() == 1 && gradient_dtype_ == shard_dtype_) {
    arriving_ = gradient_.take();
    reduction_ = ranks_.replicate.size() == 1
                     ? comm::Work()
                     : ranks_.replicate.all_reduce(arriving_, {.op = comm::ReduceOp::kSum}, unit_);
  } else {
    arriving_ = at::empty({layout_.shard_numel()}, shard_.options());
    reduction_ = ranks_.shard.reduce_scatter(arriving_, gradient_.flat(), on_the_way(), unit_);
  }
  reducing_ = true;
  account();
}

// What a narrow form of the gradient may have: the dtype of the full parameters, when reductions widen it themselves,
// to the same float32 that it would be held in otherwise.
std::optional<c10::ScalarType> FlatGroup::narrow_gradient() const {
  const bool narrow = full_dtype_ == at::kBFloat16 || full_dtype_ == at::kHalf;
  const bool widened =
      ranks_.shard.size() > 1 && gradient_dtype_ == at::kFloat && ranks_.shard.adds_in_rank_order(shard_);
  return narrow && widened ? std::optional(full_dtype_) : std::nullopt;
}

// Division and factor come last, over the sums of all ranks, as one process would do it. Where the sums end with the
// scatter, unrounded, that is before they are written: a pass over the piece less.
bool FlatGroup::scales_on_the_way() const {
  const bool unrounded = shard_dtype_ == at::kDouble || (shard_dtype_ == at::kFloat && gradient_dtype_ != at::kDouble);
  return unrounded && ranks_.shard.size() > 1 && ranks_.replicate.size() == 1;
}

comm::Reduction FlatGroup::on_the_way() const {
  if (!scales_on_the_way()) return {.op = comm::ReduceOp::kSum};
  const bool average = options_.reduce_op == ReduceOp::kAverage;
  return {.op = average ? comm::ReduceOp::kAverage : comm::ReduceOp::kSum, .factor = options_.gradient_factor};
}

void FlatGroup::scale(at::Tensor& piece) const {
  if (scales_on_the_way()) return;
  if (options_.reduce_op == ReduceOp::kAverage && ranks_.count() > 1) piece.div_(ranks_.count());
  if (options_.gradient_factor != 1) piece.mul_(options_.gradient_factor);
}

void FlatGroup::begin_replicas() {
  if (!gradient_.exists() || !reducing_) return;
  reduction_.wait();
  ledger_.look();
  gradient_.release();
  account();
  if (ranks_.replicate.size() == 1) return;
  reduction_ = ranks_.replicate.all_reduce(arriving_, {.op = comm::ReduceOp::kSum}, unit_);
}

void FlatGroup::finish_reduce() {
  if (!reducing_) return;
  const at::NoGradGuard no_grad;
  begin_replicas();
  reducing_ = false;
  reduction_.wait();
  scale(arriving_);
  if (reduced_.defined()) {
    reduced_.add_(arriving_);
    arriving_.reset();
  } else {
    reduced_ = std::move(arriving_);
  }
  account();
}

void FlatGroup::append_flags(std::vector<int32_t>& flags) const {
  for (const Slot& slot : slots_) flags.push_back(slot.seen ? 1 : 0);
}

void FlatGroup::hand_over(const int32_t*& flags) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const bool used = *flags++ != 0;
    at::Tensor before = std::exchange(slot.before, at::Tensor());
    if (!reduced_.defined() || !used || !slot.parameter.requires_grad()) {
      if (before.defined()) slot.parameter.mutable_grad() = std::move(before);
    } else {
      const Piece mine = piece(i);
      at::Tensor grad = as_gradient(reduced_.narrow(0, mine.shard_offset, mine.numel()));
      if (before.defined()) at::add_out(grad, before, grad);
      slot.parameter.mutable_grad() = std::move(grad);
    }
    if (reduced_.defined()) slot.seen = false;
  }
  if (!reduced_.defined()) return;
  handed_over_ = reduced_.storage().getWeakStorageImpl();
  reduced_.reset();
  account();
}

void FlatGroup::drop_gradients() noexcept {
  try {
    reduction_.wait();  // it reads the memory that goes now
  } catch (...) {       // NOLINT(bugprone-empty-catch): the next collective of this world throws the same
  }
  reduction_ = comm::Work();
  gradient_.release();
  arriving_.reset();
  reduced_.reset();
  for (Slot& slot : slots_) {
    if (open_ && slot.parameter.requires_grad()) slot.parameter.mutable_grad().reset();
    if (slot.before.defined()) slot.parameter.mutable_grad() = std::exchange(slot.before, at::Tensor());
    slot.seen = slot.waiting = false;
  }
  open_ = reducing_ = false;
  pending_ = 0;
  account();
}

at::Tensor FlatGroup::flat_gradient() const {
  const auto storage = handed_over_.lock();
  if (storage == nullptr) return {};
  at::Tensor flat;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& grad = slots_[i].parameter.grad();
    if (!grad.defined() || grad.storage().unsafeGetStorageImpl() != storage.get()) return {};
    if (!flat.defined()) flat = grad.as_strided({layout_.shard_numel()}, {1}, 0);
  }
  return flat;
}

}  // namespace neap::shard
