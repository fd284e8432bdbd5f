#include "neap/shard/fully_shard.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "neap/base/error.h"
#include "neap/base/scope_exit.h"
#include "neap/shard/coordinator.h"
#include "neap/shard/parameter_owners.h"

namespace neap::shard {
namespace {

std::vector<GroupKey> group_keys(const std::vector<NamedParameter>& parameters) {
  std::map<std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex, bool>, int64_t> kinds;
  std::vector<GroupKey> keys;
  for (const auto& [name, p] : parameters) {
    const std::tuple kind{p.scalar_type(), p.device().type(), p.device().index(), p.requires_grad()};
    keys.push_back({kinds.try_emplace(kind, static_cast<int64_t>(kinds.size())).first->second,
                    p.numel() * static_cast<int64_t>(p.element_size())});
  }
  return keys;
}

using PiecesByName = std::map<std::string_view, std::vector<const Shard*>>;

PiecesByName sort_by_name(const std::vector<Shard>& pieces) {
  PiecesByName by_name;
  for (const Shard& piece : pieces) by_name[piece.name].push_back(&piece);
  return by_name;
}

// Together the pieces contain all of this rank's.
void check_cover(const FlatGroup& group, std::size_t i, std::vector<const Shard*> pieces) {
  const Piece mine = group.piece(i);
  std::ranges::sort(pieces, {}, &Shard::begin);
  int64_t covered = mine.begin;
  for (const Shard* piece : pieces) {
    NEAP_CHECK(at::IntArrayRef(piece->full_size) == group.full_sizes(i), "[shard] expected pieces of '", piece->name,
               "' of shape ", group.full_sizes(i), "; found some of ", at::IntArrayRef(piece->full_size));
    if (piece->begin <= covered) covered = std::max(covered, piece->end);
  }
  NEAP_CHECK(covered >= mine.end, "[shard] expected pieces that cover elements ", mine.begin, " to ", mine.end, " of '",
             group.parameter_name(i), "'; found none from ", covered, " on");
}

void check_options(const Options& options) {
  NEAP_CHECK(options.bucket_limit.count >= 0, "[shard.bucket_limit] expected at least 0; found ", options.bucket_limit);
  NEAP_CHECK(std::isfinite(options.gradient_factor), "[shard.gradient_factor] expected a finite number; found ",
             options.gradient_factor);
  for (const auto& dtype : {options.param_dtype, options.reduce_dtype, options.output_dtype}) {
    NEAP_CHECK(!dtype || c10::isFloatingType(*dtype),
               "[shard] expected floating-point dtypes for mixed precision; "
               "found ",
               *dtype);
  }
}

void check_parameters(const std::vector<OwnedUnit>& units, const Options& options) {
  for (const OwnedUnit& owned : units) {
    for (const NamedParameter& parameter : owned.parameters) {
      NEAP_CHECK(!Coordinator::watched(parameter.tensor), "[shard] expected a model that is not sharded; found that '",
                 parameter.name, "' is sharded already; call dissolve() on its Sharded first");
      FlatGroup::check(parameter, options);
    }
  }
}

}  // namespace

class Sharded::Impl {
 public:
  // REQUIRES: checked options.
  Impl(std::vector<OwnedUnit> units, Ranks ranks, Options options)
      : coordinator(std::make_shared<Coordinator>(ranks, std::move(options))) {
    check_parameters(units, coordinator->options());
    for (OwnedUnit& owned : units) build(owned);
    coordinator->watch_gradients();
  }
  ~Impl() { coordinator->unwatch_gradients(); }

  autograd::HookPoint& point_of(const torch::nn::Module& module) {
    const auto found = points.find(&module);
    NEAP_CHECK(found != points.end(),
               "[shard] expected a module that is a unit; found another one; name it in Options::modules");
    return *found->second;
  }

  template <class Visit>
  void for_each_parameter(const Visit& visit) {
    for (const auto& unit : coordinator->units()) {
      for (const auto& group : unit->groups) {
        for (std::size_t i = 0; i < group->size(); ++i) visit(*group, i);
      }
    }
  }

  double norm(double p);

  std::shared_ptr<Coordinator> coordinator;
  std::unordered_map<const torch::nn::Module*, autograd::HookPoint*> points;
  autograd::HookPoint* root_point = nullptr;

 private:
  void build(OwnedUnit& owned);

  std::vector<std::unique_ptr<autograd::HookPoint>> own_points_;
  std::vector<autograd::HookHandle> handles_;
};

void Sharded::Impl::build(OwnedUnit& owned) {
  const bool root = owned.name.empty();
  const std::string label = root ? "root" : owned.name;
  Unit& unit = coordinator->add_unit(label, root);
  const Options& options = coordinator->options();
  const auto plan = plan_groups(group_keys(owned.parameters), options.comm_fusion, options.bucket_limit.count);
  for (const auto& indices : plan) {
    std::vector<NamedParameter> parameters;
    for (const std::size_t i : indices) parameters.push_back(std::move(owned.parameters[i]));
    unit.groups.push_back(std::make_unique<FlatGroup>(label, std::move(parameters), coordinator->ranks(),
                                                      coordinator->options(), coordinator->ledger()));
  }
  if (owned.point == nullptr) own_points_.push_back(std::make_unique<autograd::HookPoint>());
  autograd::HookPoint& point = owned.point != nullptr ? *owned.point : *own_points_.back();
  if (owned.module != nullptr) points.emplace(owned.module, &point);
  if (root) root_point = &point;
  handles_.push_back(point.attach(std::make_shared<ShardHook>(coordinator, unit), autograd::HookOrder::kShard));
}

// Each rank adds up the pieces that it holds; replicas hold the same ones, so they need no adding.
double Sharded::Impl::norm(double p) {
  const at::NoGradGuard no_grad;
  const bool largest = std::isinf(p);
  std::optional<at::Tensor> total;
  for_each_parameter([&](FlatGroup& group, std::size_t i) {
    const at::Tensor& grad = group.parameter(i).grad();
    if (!grad.defined() || grad.numel() == 0) return;
    const at::Tensor norm = at::linalg_vector_norm(grad, p, {}, false, at::kDouble);
    const at::Tensor term = largest ? norm : norm.pow(p);
    if (!total) {
      total = term;
    } else {
      total = largest ? at::maximum(*total, term) : *total + term;
    }
  });
  if (!total) {
    const auto& units = coordinator->units();
    const auto first = std::ranges::find_if(units, [](const auto& unit) { return !unit->groups.empty(); });
    if (first == units.end()) return 0;
    total = at::zeros({}, (*first)->groups.front()->flat_shard().options().dtype(at::kDouble));
  }
  const comm::ReduceOp op = largest ? comm::ReduceOp::kMax : comm::ReduceOp::kSum;
  comm::Group& shard = coordinator->ranks().shard;
  if (shard.size() > 1) shard.all_reduce(*total, {.op = op}, "gradient norm").wait();
  const double sum = total->item<double>();
  return largest ? sum : std::pow(sum, 1 / p);
}

Sharded::Sharded(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sharded::~Sharded() = default;
Sharded::Sharded(Sharded&&) noexcept = default;
Sharded& Sharded::operator=(Sharded&&) noexcept = default;

Sharded fully_shard(torch::nn::Module& model, comm::MeshGroups groups, Options options) {
  check_options(options);
  std::vector<OwnedUnit> units = assign_parameters(model, options.modules);
  const Ranks ranks{groups.shard, groups.replicate};
  return Sharded(std::make_unique<Sharded::Impl>(std::move(units), ranks, std::move(options)));
}

Sharded fully_shard(const std::vector<NamedUnit>& units, comm::MeshGroups groups, Options options) {
  NEAP_ASSERT(!units.empty() && units.back().name.empty(), "the root is not the last of ", units.size(), " units");
  check_options(options);
  const Ranks ranks{groups.shard, groups.replicate};
  return Sharded(std::make_unique<Sharded::Impl>(assign_parameters(units), ranks, std::move(options)));
}

void check_shardable(const std::vector<NamedUnit>& units, const Options& options) {
  check_options(options);
  check_parameters(assign_parameters(units), options);
}

autograd::HookPoint& Sharded::root_point() { return *impl_->root_point; }
autograd::HookPoint& Sharded::unit_point(const torch::nn::Module& module) { return impl_->point_of(module); }

at::Tensor Sharded::to_output_dtype(at::Tensor result) const {
  const auto& dtype = options().output_dtype;
  return dtype && result.defined() && result.is_floating_point() ? result.to(*dtype) : result;
}

Sharded::NoSync::NoSync(Sharded& sharded) : sharded_(sharded), before_(sharded.impl_->coordinator->sync()) {
  sharded_.impl_->coordinator->set_sync(false);
}
Sharded::NoSync::~NoSync() { sharded_.impl_->coordinator->set_sync(before_); }

void Sharded::with_full_parameters(c10::function_ref<void()> body, bool write_back) {
  Coordinator& coordinator = *impl_->coordinator;
  coordinator.come_to_rest("with_full_parameters()");
  const ScopeExit end([&] { coordinator.reshard_all_quietly(); });
  coordinator.unshard_all();
  body();
  for (const auto& unit : coordinator.units()) {
    for (const auto& group : unit->groups) {
      if (write_back) group->write_back();
    }
  }
  coordinator.reshard_all();  // notices what was written and not taken over
}

void Sharded::reshard() { impl_->coordinator->come_to_rest("reshard()"); }

double Sharded::grad_norm(double p) {
  NEAP_CHECK(p > 0, "[shard] expected a norm of order p > 0, or infinity; found ", p);
  impl_->coordinator->come_to_rest("a gradient norm");
  return impl_->norm(p);
}

double Sharded::clip_grad_norm(double max_norm, double p) {
  NEAP_CHECK(max_norm > 0, "[shard] expected a limit above 0 for the gradient norm; found ", max_norm);
  const double norm = grad_norm(p);
  const double scale = max_norm / (norm + 1e-6);
  if (scale >= 1) return norm;
  const at::NoGradGuard no_grad;
  impl_->for_each_parameter([&](FlatGroup& group, std::size_t i) {
    if (at::Tensor grad = group.parameter(i).grad(); grad.defined()) grad.mul_(scale);
  });
  return norm;
}

std::vector<at::Tensor> Sharded::parameters() const {
  std::vector<at::Tensor> parameters;
  impl_->for_each_parameter([&](FlatGroup& group, std::size_t i) { parameters.push_back(group.parameter(i)); });
  return parameters;
}

std::vector<Shard> Sharded::shards() {
  impl_->coordinator->come_to_rest("shards()");
  std::vector<Shard> shards;
  impl_->for_each_parameter([&](FlatGroup& group, std::size_t i) {
    const Piece piece = group.piece(i);
    shards.push_back({group.parameter_name(i), group.full_sizes(i).vec(), piece.begin, piece.end, group.shard_view(i)});
  });
  return shards;
}

std::vector<FlatShard> Sharded::flat_shards() {
  impl_->coordinator->come_to_rest("flat_shards()");
  std::vector<FlatShard> flats;
  for (const auto& unit : impl_->coordinator->units()) {
    for (const auto& group : unit->groups) flats.push_back({group->flat_shard(), group->flat_gradient()});
  }
  return flats;
}

void Sharded::check_shards(const std::vector<Shard>& pieces) {
  impl_->coordinator->come_to_rest("load_shards()");
  const PiecesByName by_name = sort_by_name(pieces);
  for (const Shard& piece : pieces) {
    NEAP_CHECK(piece.data.dim() == 1 && piece.data.numel() == piece.end - piece.begin,
               "[shard] expected the piece of '", piece.name, "' to hold elements ", piece.begin, " to ", piece.end,
               "; found ", piece.data.sizes());
  }
  std::size_t known = 0;
  impl_->for_each_parameter([&](FlatGroup& group, std::size_t i) {
    const auto found = by_name.find(group.parameter_name(i));
    check_cover(group, i, found == by_name.end() ? std::vector<const Shard*>() : found->second);
    known += found == by_name.end() ? 0 : 1;
  });
  NEAP_CHECK(known == by_name.size(), "[shard] expected pieces of the model's parameters alone; found ",
             by_name.size() - known, " other names");
}

void Sharded::load_shards(const std::vector<Shard>& pieces) {
  check_shards(pieces);
  const PiecesByName by_name = sort_by_name(pieces);
  impl_->for_each_parameter([&](FlatGroup& group, std::size_t i) {
    const auto found = by_name.find(group.parameter_name(i));
    if (found == by_name.end()) return;
    for (const Shard* piece : found->second) group.load_piece(i, piece->begin, piece->data);
  });
}

std::map<std::string, at::Tensor> Sharded::full_state(const std::function<bool(const std::string&)>& wanted) {
  Coordinator& coordinator = *impl_->coordinator;
  coordinator.come_to_rest("full_state()");
  const at::NoGradGuard no_grad;
  const bool mine = coordinator.ranks().shard.rank() == 0;
  std::map<std::string, at::Tensor> state;
  for (const auto& unit : coordinator.units()) {
    for (const auto& group : unit->groups) {
      std::vector<bool> takes;
      for (std::size_t i = 0; i < group->size(); ++i) takes.push_back(!wanted || wanted(group->parameter_name(i)));
      if (std::ranges::find(takes, true) == takes.end()) continue;
      group->gather_in_own_dtype([&](std::size_t i, const at::Tensor& full) {
        if (!mine || !takes[i]) return;
        state.emplace(group->parameter_name(i), full.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
      });
    }
  }
  return state;
}

void Sharded::check_full_state(const std::map<std::string, at::Tensor>& state) {
  impl_->coordinator->come_to_rest("load_full_state()");
  std::set<std::string> unknown;
  for (const auto& [name, value] : state) unknown.insert(name);
  impl_->for_each_parameter([&](FlatGroup& group, std::size_t i) {
    const auto found = state.find(group.parameter_name(i));
    NEAP_CHECK(found != state.end(), "[shard] expected '", group.parameter_name(i), "' in the state; found none");
    NEAP_CHECK(found->second.sizes() == group.full_sizes(i), "[shard] expected '", found->first, "' of shape ",
               group.full_sizes(i), "; found ", found->second.sizes());
    unknown.erase(found->first);
  });
  NEAP_CHECK(unknown.empty(), "[shard] expected parameters of the model alone in the state; found '", *unknown.begin(),
             "'");
}

void Sharded::load_full_state(const std::map<std::string, at::Tensor>& state) {
  check_full_state(state);
  impl_->for_each_parameter(
      [&](FlatGroup& group, std::size_t i) { group.load_full(i, state.at(group.parameter_name(i))); });
}

Usage Sharded::usage() const { return impl_->coordinator->usage(); }
Held Sharded::held() const { return impl_->coordinator->ledger().held(); }
void Sharded::watch_memory(std::function<void()> look) {
  impl_->coordinator->ledger().watch(std::move(look));
  impl_->coordinator->account();
}
void Sharded::reset_peak() { impl_->coordinator->reset_peak(); }
const Options& Sharded::options() const { return impl_->coordinator->options(); }

std::vector<std::string> Sharded::unit_names() const {
  std::vector<std::string> names;
  for (const auto& unit : impl_->coordinator->units()) names.push_back(unit->root ? "" : unit->name);
  return names;
}

void Sharded::dissolve() {
  Coordinator& coordinator = *impl_->coordinator;
  coordinator.come_to_rest("dissolve()");
  coordinator.unwatch_gradients();
  for (const auto& unit : coordinator.units()) {
    for (const auto& group : unit->groups) group->dissolve();
    unit->groups.clear();
  }
}

}  // namespace neap::shard
