// neaptide._C: the offload engine.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "neap/autograd/named_hook_points.h"
#include "neap/base/error.h"
#include "neap/offload/engine.h"
#include "neap/offload/foreign_class.h"
#include "python/src/arguments.h"
#include "python/src/bind.h"
#include "python/src/unit.h"

namespace neap::python {
namespace {

// A scope that ends at the end of a `with` block, not with the object.
class OpenScope {
 public:
  explicit OpenScope(offload::Engine& engine) { scope_.emplace(engine); }
  void close() { scope_.reset(); }

 private:
  std::optional<offload::Scope> scope_;
};

// The tensor's object in Python, if it has one. The accessor goes by two names in the versions of torch that we build
// with.
template <class Slot>
PyObject* object_of(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj();
  } else {
    return slot.check_pyobj().value_or(nullptr);
  }
}

// A subclass of torch.Tensor's that is not dispatched to (those libtorch knows of). Without the interpreter's lock:
// whoever saves the tensor holds it, and the class of an object stays.
bool is_of_a_subclass(const at::TensorBase& tensor) {
  PyObject* object = object_of(*tensor.unsafeGetTensorImpl()->pyobj_slot());
  return object != nullptr && !THPVariable_CheckTypeExact(Py_TYPE(object));
}

offload::Policy to_policy(const py::object& function) {
  if (function.is_none()) return nullptr;
  if (PyCallable_Check(function.ptr()) == 0) {
    NEAP_USER_ERROR("[offload.policy] expected a function of a tensor, the unit's and the operator's name; found ",
                    py::repr(function).cast<std::string>());
  }
  return [held = Callable(function)](const at::Tensor& tensor, std::string_view unit, std::string_view op) {
    const py::gil_scoped_acquire locked;
    const py::object answer = (*held)(tensor, unit, op);
    if (py::isinstance<py::str>(answer)) {
      const auto word = answer.cast<std::string>();
      if (word == "keep") return offload::Decision::kKeep;
      if (word == "offload") return offload::Decision::kOffload;
    }
    raise_user_error("[offload.policy] expected the answer 'keep' or 'offload'; found " +
                     py::repr(answer).cast<std::string>());
  };
}

int to_count(py::handle value, const char* what) {
  int overflow = 0;
  const long number =
      PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr()) ? PyLong_AsLongAndOverflow(value.ptr(), &overflow) : -1;
  NEAP_CHECK(number >= 0 && number <= 1'000'000, "[", what, "] expected a number of units, 0 or more; found ",
             py::repr(value).cast<std::string>());
  return static_cast<int>(number);
}

void set_option(offload::Options& options, const std::string& name, const py::object& value) {
  const std::string what = "offload." + name;
  const auto text = [&] { return py::str(value).cast<std::string>(); };
  if (name == "mode") {
    options.mode = offload::parse_mode(text(), what);
  } else if (name == "prefetch") {
    options.prefetch = offload::parse_prefetch(text(), what);
  } else if (name == "device_budget") {
    options.device_budget = to_bytes(value, what);
  } else if (name == "min_bytes") {
    options.min_bytes = to_bytes(value, what);
  } else if (name == "max_in_flight") {
    options.max_in_flight = to_bytes(value, what);
  } else if (name == "device_limit") {
    options.device_limit = value.is_none() ? std::nullopt : std::optional(to_bytes(value, what));
  } else if (name == "host_cache_limit") {
    options.host_cache_limit = to_bytes(value, what);
  } else if (name == "host_limit") {
    options.host_limit = value.is_none() ? std::nullopt : std::optional(to_bytes(value, what));
  } else if (name == "keep_last") {
    options.keep_last = value.is_none() ? std::nullopt : std::optional(to_count(value, what.c_str()));
  } else if (name == "pin") {
    options.pin = to_bool(value, what.c_str());
  } else if (name == "policy") {
    options.policy = to_policy(value);
  } else {
    NEAP_USER_ERROR(
        "[offload] expected one of the options mode, prefetch, device_budget, min_bytes, max_in_flight, device_limit, "
        "host_cache_limit, host_limit, keep_last, pin, policy; found '",
        name, "'");
  }
}

std::unique_ptr<offload::Engine> make_engine(const py::dict& values) {
  offload::Options options;
  for (const auto& [name, value] : values) {
    set_option(options, name.cast<std::string>(), py::reinterpret_borrow<py::object>(value));
  }
  return std::make_unique<offload::Engine>(std::move(options));
}

using NamedUnits = std::vector<std::pair<std::string, Unit*>>;

std::vector<autograd::NamedHookPoint> points_of(const NamedUnits& units) {
  std::vector<autograd::NamedHookPoint> points;
  for (const auto& [name, unit] : units) points.push_back({name, &unit->point(), points.size()});
  return points;
}

void attach(offload::Engine& engine, std::uintptr_t model, const NamedUnits& units, const py::object& list_tensors,
            const NamedUnits& after_units) {
  const auto list = [held = Callable(list_tensors)] {
    const py::gil_scoped_acquire locked;
    return (*held)().cast<std::vector<at::Tensor>>();
  };
  const py::gil_scoped_release unlocked;
  engine.attach({reinterpret_cast<const void*>(model), points_of(units), points_of(after_units), list(), list});
}

std::optional<int64_t> count_of(const std::optional<Bytes>& bytes) {
  return bytes ? std::optional(bytes->count) : std::nullopt;
}

void bind_report(py::module_& module) {
  using offload::StepReport;
  py::class_<StepReport> report(module, "StepReport");
  report.def_readonly("passes", &StepReport::passes)
      .def_readonly("saved_tensors", &StepReport::saved_tensors)
      .def_readonly("kept_tensors", &StepReport::kept_tensors)
      .def_readonly("offloaded_storages", &StepReport::offloaded_storages)
      .def_readonly("reloaded_storages", &StepReport::reloaded_storages)
      .def_readonly("late_reloads", &StepReport::late_reloads)
      .def_readonly("forwarded_unpacks", &StepReport::forwarded_unpacks)
      .def_readonly("exposed_wait_ns", &StepReport::exposed_wait_ns)
      .def_readonly("never_hit", &StepReport::never_hit)
      .def_readonly("peak_piece", &StepReport::peak_piece);
  def_bytes(report, "saved_bytes", &StepReport::saved_bytes);
  def_bytes(report, "offloaded_bytes", &StepReport::offloaded_bytes);
  def_bytes(report, "reloaded_bytes", &StepReport::reloaded_bytes);
  def_bytes(report, "planned_drop", &StepReport::planned_drop);
  def_bytes(report, "measured_drop", &StepReport::measured_drop);
  def_bytes(report, "stayed_bytes", &StepReport::stayed_bytes);
  def_bytes(report, "away_at_peak", &StepReport::away_at_peak);
  def_bytes(report, "host_bytes", &StepReport::host_bytes);
  def_bytes(report, "host_locked", &StepReport::host_locked);
  def_bytes(report, "host_locked_peak", &StepReport::host_locked_peak);
  def_bytes(report, "prefetch_window", &StepReport::prefetch_window);
  def_bytes(report, "in_flight_window", &StepReport::in_flight_window);
  report.def_property_readonly("device_peak", [](const StepReport& r) { return count_of(r.device_peak); })
      .def_property_readonly("allocated_at_turn", [](const StepReport& r) { return count_of(r.allocated_at_turn); })
      .def_property_readonly("still_referenced",
                             [](const StepReport& r) {
                               py::dict held;
                               for (const auto& [unit, bytes] : r.still_referenced) held[py::str(unit)] = bytes.count;
                               return held;
                             })
      .def_property_readonly("ratio", &StepReport::ratio)
      .def("findings", &StepReport::findings)
      .def("__str__", [](const StepReport& r) { return offload::to_string(r); });
}

void bind_counters(py::module_& module) {
  using memory::PoolCounters;
  py::class_<PoolCounters> counters(module, "HostCounters");
  def_bytes(counters, "requested", &PoolCounters::requested);
  def_bytes(counters, "in_use", &PoolCounters::in_use);
  def_bytes(counters, "in_flight", &PoolCounters::in_flight);
  def_bytes(counters, "idle", &PoolCounters::idle);
  def_bytes(counters, "locked", &PoolCounters::locked);
  def_bytes(counters, "locked_peak", &PoolCounters::locked_peak);
  counters.def_readonly("acquires", &PoolCounters::acquires)
      .def_readonly("hits", &PoolCounters::hits)
      .def_readonly("refusals", &PoolCounters::refusals)
      .def_readonly("slab_allocations", &PoolCounters::slab_allocations)
      .def_readonly("evictions", &PoolCounters::evictions)
      .def_readonly("pageable_slabs", &PoolCounters::pageable_slabs);
}

}  // namespace

void bind_offload(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  bind_report(module);
  bind_counters(module);
  offload::set_foreign_class(&is_of_a_subclass);
  py::class_<OpenScope>(module, "Scope").def("close", &OpenScope::close, unlocked);
  py::class_<offload::Engine>(module, "Engine")
      .def(py::init(&make_engine), py::arg("options"))
      .def("attach", &attach, py::arg("model"), py::arg("units"), py::arg("list_tensors"),
           py::arg("after_units") = NamedUnits{})
      .def("detach", &offload::Engine::detach, unlocked)
      .def("unit_names", &offload::Engine::unit_names, unlocked)
      .def("take_step_report", &offload::Engine::take_step_report, unlocked)
      .def("host_counters", &offload::Engine::host_counters, unlocked)
      .def(
          "open_scope", [](offload::Engine& engine) { return std::make_unique<OpenScope>(engine); }, unlocked);
}

}  // namespace neap::python
