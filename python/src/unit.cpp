// neaptide._C: units made of Python modules, and which modules they are.
#include "python/src/unit.h"

#include <ATen/SavedTensorHooks.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>
#include <vector>

#include "neap/autograd/backward_reads.h"
#include "neap/autograd/unit_selection.h"
#include "neap/base/error.h"

namespace neap::python {
namespace {

using Tensors = std::vector<at::Tensor>;

// Tensors inside of nested tuples, lists, dicts and dataclasses: what modules take and return.
void add_tensors(py::handle value, Tensors& tensors, int depth = 0) {
  constexpr int kDeepest = 8;  // a structure that contains itself has no end
  if (THPVariable_Check(value.ptr())) {
    tensors.push_back(THPVariable_Unpack(value.ptr()));
  } else if (depth == kDeepest) {
    return;
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(value)) add_tensors(item, tensors, depth + 1);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(value)) add_tensors(item.second, tensors, depth + 1);
  } else if (py::hasattr(py::type::handle_of(value), "__dataclass_fields__")) {  // of its class: objects may have any
    for (const auto& field : value.attr("__dataclass_fields__").cast<py::dict>()) {
      if (py::hasattr(value, field.first)) add_tensors(value.attr(field.first), tensors, depth + 1);
    }
  }
}

}  // namespace

py::object Unit::run(const py::object& forward, const py::tuple& args, const py::dict& kwargs) {
  if (!point_.has_hooks()) return forward(*args, **kwargs);
  if (!at::SavedTensorDefaultHooks::is_enabled()) {
    NEAP_CHECK(!needs_hooks,
               "[shard] expected the forward of a sharded module outside of transforms; found it inside "
               "of one of torch.func, where its parameters cannot be gathered; transform functions inside the module");
    return forward(*args, **kwargs);
  }
  Tensors inputs;
  add_tensors(args, inputs);
  add_tensors(kwargs, inputs);
  py::object result;
  // The hooks run without the interpreter's lock, the module with it.
  const py::gil_scoped_release unlocked;
  point_.run(inputs, [&] {
    const py::gil_scoped_acquire locked;
    result = forward(*args, **kwargs);
    if (reads_no_parameters) autograd::backward_reads_no_parameters(point_);
    Tensors outputs;
    add_tensors(result, outputs);
    return outputs;
  });
  return result;
}

void bind_units(py::module_& module) {
  py::class_<Unit>(module, "Unit")
      .def(py::init<>())
      .def_readwrite("needs_hooks", &Unit::needs_hooks)
      .def_readwrite("reads_no_parameters", &Unit::reads_no_parameters)
      .def("run", &Unit::run, py::arg("forward"), py::arg("args"), py::arg("kwargs"));
  module.def(
      "select_units",
      [](std::vector<std::string> modules, std::vector<std::string> units, std::vector<std::string> layers,
         const std::vector<std::string>& patterns, const std::string& section) {
        return autograd::select_units({std::move(modules), std::move(units), std::move(layers)}, patterns, section);
      },
      py::arg("modules"), py::arg("units"), py::arg("layers"), py::arg("patterns"), py::arg("section"));
  module.def("units_after", &autograd::units_after, py::arg("units"), py::arg("chosen"));
}

}  // namespace neap::python
