// neaptide._C: ranks, and models in pieces over them.
#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/comm/agreement.h"
#include "neap/comm/store_world.h"
#include "neap/shard/fully_shard.h"
#include "python/src/arguments.h"
#include "python/src/bind.h"
#include "python/src/unit.h"

namespace neap::python {
namespace {

// Whatever ends here may wait for other ranks, or hold tensors that another thread lets go of.
struct DeleteUnlocked {
  template <class Object>
  void operator()(Object* object) const {
    const py::gil_scoped_release unlocked;
    delete object;
  }
};
template <class Object>
using Owner = std::unique_ptr<Object, DeleteUnlocked>;

// ---- ranks

Owner<comm::World> connect(const c10d::ProcessGroup& group, const std::string& prefix, bool one_host, bool agent_store,
                           double timeout_s) {
  NEAP_CHECK(timeout_s > 0 && timeout_s < 1e7, "[shard.timeout] expected a number of seconds above 0; found ",
             timeout_s);
  comm::Launch launch;
  launch.rank = group.getRank();
  launch.world = group.getSize();
  launch.local_world = one_host ? launch.world : 1;
  launch.agent_store = agent_store;
  const auto store = group.getStore();
  NEAP_CHECK(launch.world == 1 || store, "[shard] expected a process group whose ranks have met at a store; found '",
             group.getGroupName(), "' without one; initialise torch.distributed with init_method or store");
  const py::gil_scoped_release unlocked;
  comm::WorldOptions options;
  options.timeout = std::chrono::milliseconds(std::llround(std::ceil(timeout_s * 1000)));
  c10::intrusive_ptr<c10d::Store> own;
  if (store) own = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  return Owner<comm::World>(comm::connect_at(own, launch, options).release());
}

// ---- options

template <class Value>
std::optional<Value> to_optional(const py::object& value, const std::string& what, const char* expected) {
  if (value.is_none()) return std::nullopt;
  try {
    return value.cast<Value>();
  } catch (const py::cast_error&) {
    NEAP_USER_ERROR("[", what, "] expected ", expected, "; found ", py::repr(value).cast<std::string>());
  }
}

std::optional<c10::Device> to_device(const py::object& value, const std::string& what) {
  constexpr const char* kDevice = "a torch.device, its name, or None";
  if (!py::isinstance<py::str>(value)) return to_optional<c10::Device>(value, what, kDevice);
  const auto name = value.cast<std::string>();
  try {
    return c10::Device(name);
  } catch (const c10::Error&) {
    NEAP_USER_ERROR("[", what, "] expected ", kDevice, "; found '", name, "'");
  }
}

std::optional<Callable> to_function(const py::object& value, const std::string& what) {
  if (value.is_none()) return std::nullopt;
  NEAP_CHECK(PyCallable_Check(value.ptr()) != 0, "[", what, "] expected a function; found ",
             py::repr(value).cast<std::string>());
  return Callable(value);
}

shard::ReduceOp to_reduce_op(const py::object& value) {
  const auto text = py::str(value).cast<std::string>();
  NEAP_CHECK(text == "avg" || text == "sum", "[shard.reduce_op] expected avg or sum; found '", text, "'");
  return text == "avg" ? shard::ReduceOp::kAverage : shard::ReduceOp::kSum;
}

void set_option(shard::Options& options, const std::string& name, const py::object& value) {
  const std::string what = "shard." + name;
  constexpr const char* kDtype = "a torch.dtype or None";
  if (name == "comm_fusion") {
    options.comm_fusion = to_bool(value, what);
  } else if (name == "bucket_limit") {
    options.bucket_limit = to_bytes(value, what);
  } else if (name == "stage") {
    options.stage = shard::parse_stage(py::str(value).cast<std::string>());
  } else if (name == "prefetch") {
    options.prefetch = to_bool(value, what);
  } else if (name == "reduce_op") {
    options.reduce_op = to_reduce_op(value);
  } else if (name == "gradient_factor") {
    options.gradient_factor = to_optional<double>(value, what, "a number").value_or(1);
  } else if (name == "param_dtype") {
    options.param_dtype = to_optional<c10::ScalarType>(value, what, kDtype);
  } else if (name == "reduce_dtype") {
    options.reduce_dtype = to_optional<c10::ScalarType>(value, what, kDtype);
  } else if (name == "output_dtype") {
    options.output_dtype = to_optional<c10::ScalarType>(value, what, kDtype);
  } else if (name == "device") {
    options.device = to_device(value, what);
  } else if (name == "block_of") {
    if (const auto function = to_function(value, what)) {
      options.block_of = [function = *function](const std::string& parameter, at::IntArrayRef sizes) {
        const py::gil_scoped_acquire locked;
        return (*function)(parameter, py::tuple(py::cast(sizes.vec()))).cast<int64_t>();
      };
    }
  } else if (name == "initialize") {
    if (const auto function = to_function(value, what)) {
      options.initialize = [function = *function](const std::string& parameter, const at::Tensor& full) {
        const py::gil_scoped_acquire locked;
        (*function)(parameter, full);
      };
    }
  } else {
    NEAP_USER_ERROR(
        "[shard] expected one of the options comm_fusion, bucket_limit, stage, prefetch, reduce_op, gradient_factor, "
        "param_dtype, reduce_dtype, output_dtype, device, block_of, initialize; found '",
        name, "'");
  }
}

shard::Options to_options(const py::dict& values) {
  shard::Options options;
  for (const auto& [name, value] : values) {
    set_option(options, name.cast<std::string>(), py::reinterpret_borrow<py::object>(value));
  }
  return options;
}

// ---- models

// The root last.
using Units = std::vector<std::tuple<std::string, Unit*, std::vector<std::pair<std::string, at::Tensor>>>>;

std::vector<shard::NamedUnit> to_units(const Units& units) {
  std::vector<shard::NamedUnit> named;
  for (const auto& [name, unit, parameters] : units) {
    shard::NamedUnit& added = named.emplace_back(shard::NamedUnit{name, &unit->point(), {}});
    for (const auto& [parameter, tensor] : parameters) added.parameters.push_back({parameter, tensor});
  }
  return named;
}

Owner<shard::Sharded> make_sharded(comm::World& world, int replicate, const Units& units, const py::dict& values) {
  shard::Options options = to_options(values);
  const std::vector<shard::NamedUnit> named = to_units(units);
  const py::gil_scoped_release unlocked;
  const comm::Mesh mesh(world.size(), world.rank(), {.data_parallel_replicate = replicate});
  return Owner<shard::Sharded>(new shard::Sharded(shard::fully_shard(named, world.groups(mesh), std::move(options))));
}

std::vector<PieceTuple> shards(shard::Sharded& sharded) {
  std::vector<PieceTuple> pieces;
  for (auto& piece : sharded.shards()) {
    pieces.emplace_back(std::move(piece.name), std::move(piece.full_size), piece.begin, piece.end, piece.data);
  }
  return pieces;
}

std::vector<shard::Shard> to_shards(const std::vector<PieceTuple>& pieces) {
  std::vector<shard::Shard> given;
  for (const auto& [name, full_size, begin, end, data] : pieces) given.push_back({name, full_size, begin, end, data});
  return given;
}
void check_shards(shard::Sharded& sharded, const std::vector<PieceTuple>& pieces) {
  sharded.check_shards(to_shards(pieces));
}
void load_shards(shard::Sharded& sharded, const std::vector<PieceTuple>& pieces) {
  sharded.load_shards(to_shards(pieces));
}

void with_full_parameters(shard::Sharded& sharded, const py::object& body, bool write_back) {
  const py::gil_scoped_release unlocked;
  sharded.with_full_parameters(
      [&] {
        const py::gil_scoped_acquire locked;
        body();
      },
      write_back);
}

// Ends at the end of a `with` block, not with the object.
class OpenNoSync {
 public:
  explicit OpenNoSync(shard::Sharded& sharded) { open_.emplace(sharded); }
  void close() { open_.reset(); }

 private:
  std::optional<shard::Sharded::NoSync> open_;
};

void bind_usage(py::module_& module) {
  using shard::Usage;
  py::class_<Usage> usage(module, "ShardUsage");
  def_bytes(usage, "shards", &Usage::shards);
  def_bytes(usage, "unsharded", &Usage::unsharded);
  def_bytes(usage, "gradients", &Usage::gradients);
  def_bytes(usage, "reduced", &Usage::reduced);
  def_bytes(usage, "minimum", &Usage::minimum);
  def_bytes(usage, "padding", &Usage::padding);
  def_bytes(usage, "copied", &Usage::copied);
  usage.def_readonly("gathers", &Usage::gathers)
      .def_readonly("scatters", &Usage::scatters)
      .def_readonly("live_units", &Usage::live_units)
      .def_readonly("live_units_peak", &Usage::live_units_peak);
}

void bind_world(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<comm::World, Owner<comm::World>>(module, "World")
      .def(py::init(&connect), py::arg("group"), py::arg("prefix"), py::arg("one_host"), py::arg("agent_store"),
           py::arg("timeout_s"))
      .def_property_readonly("rank", &comm::World::rank)
      .def_property_readonly("size", &comm::World::size)
      .def(
          "exchange",
          [](comm::World& world, const std::string& text) { return comm::exchange_texts(&world, text, "agreement"); },
          py::arg("text"), unlocked)
      .def("abandon", &comm::World::abandon, py::arg("reason"), unlocked)
      .def("close", &comm::World::close, unlocked);
}

}  // namespace

void bind_shard(py::module_& module) {
  using shard::Sharded;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  bind_usage(module);
  bind_world(module);
  py::class_<OpenNoSync>(module, "NoSync").def("close", &OpenNoSync::close);
  module.def(
      "check_shardable",
      [](const Units& units, const py::dict& options) { shard::check_shardable(to_units(units), to_options(options)); },
      py::arg("units"), py::arg("options"));
  py::class_<Sharded, Owner<Sharded>>(module, "Sharded")
      .def(py::init(&make_sharded), py::arg("world"), py::arg("replicate"), py::arg("units"), py::arg("options"),
           py::keep_alive<1, 2>())
      .def("grad_norm", &Sharded::grad_norm, py::arg("p"), unlocked)
      .def("clip_grad_norm", &Sharded::clip_grad_norm, py::arg("max_norm"), py::arg("p"), unlocked)
      .def(
          "no_sync", [](Sharded& sharded) { return std::make_unique<OpenNoSync>(sharded); }, py::keep_alive<0, 1>())
      .def("with_full_parameters", &with_full_parameters, py::arg("body"), py::arg("write_back"))
      .def("reshard", &Sharded::reshard, unlocked)
      .def("shards", &shards, unlocked)
      .def("check_shards", &check_shards, py::arg("pieces"), unlocked)
      .def("check_full_state", &Sharded::check_full_state, py::arg("state"), unlocked)
      .def("load_shards", &load_shards, py::arg("pieces"), unlocked)
      .def(
          "full_state", [](Sharded& sharded) { return sharded.full_state(); }, unlocked)
      .def("load_full_state", &Sharded::load_full_state, py::arg("state"), unlocked)
      .def("usage", &Sharded::usage, unlocked)
      .def("reset_peak", &Sharded::reset_peak)
      .def("unit_names", &Sharded::unit_names)
      .def("dissolve", &Sharded::dissolve, unlocked);
}

}  // namespace neap::python
