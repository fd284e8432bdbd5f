// The extension module neaptide._C: errors, and what makes the engine at home in an interpreter.
#include <torch/csrc/Exceptions.h>
#include <torch/version.h>

#include <cstdio>
#include <exception>

#include "neap/autograd/saved_tensor_scope.h"
#include "neap/base/error.h"
#include "neap/base/error_boundary.h"
#include "neap/base/log.h"
#include "neap/base/mutex.h"
#include "python/src/arguments.h"

namespace neap::python {
namespace {

// Python's exception types; for ever, as exceptions may be translated while the interpreter ends.
struct ErrorTypes {
  PyObject* error;
  PyObject* user_error;
  PyObject* out_of_memory;
  PyObject* internal_error;
};
ErrorTypes g_errors;

// The type that says what kind of error it is.
PyObject* type_of(const Error& error) {
  if (dynamic_cast<const UserError*>(&error) != nullptr) return g_errors.user_error;
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr) return g_errors.out_of_memory;
  if (dynamic_cast<const InternalError*>(&error) != nullptr) return g_errors.internal_error;
  return g_errors.error;
}

// Same text, ours in a type of ours. Torch's own exceptions become what torch makes of them.
void translate(std::exception_ptr raised) {
  if (!raised) return;
  try {
    std::rethrow_exception(raised);
  } catch (const Error& error) {
    PyErr_SetString(type_of(error), error.what());
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(raised);
  }
}

// What torch asks for its Python type: an error of ours that comes out of a hook in forward or backward.
struct ErrorThroughTorch final : torch::PyTorchError {
  explicit ErrorThroughTorch(const Error& error) : torch::PyTorchError(error.what()), type(type_of(error)) {}
  PyObject* python_type() override { return type; }
  PyObject* type;
};
void throw_through_torch(const Error& error) { throw ErrorThroughTorch(error); }

PyObject* new_error(py::module_& module, const char* name, const char* doc, const py::tuple& bases) {
  const std::string full = std::string("neaptide.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, type);
  return type;
}

// Whoever waits for a lock of ours lets go of the interpreter's (neap/base/mutex.h says why).
void* release_interpreter() { return PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; }
void retake_interpreter(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }
constexpr WaitHooks kWaitHooks{&release_interpreter, &retake_interpreter};

// Messages of the library go where Python's go, to the logger `neaptide`.
void log_to_python(LogLevel level, const std::string& text) {
  constexpr const char* kMethods[] = {"debug", "info", "warning", "error"};
  const char* method = kMethods[static_cast<int>(level)];
  if (Py_IsInitialized() == 0 || _Py_IsFinalizing()) {
    std::fprintf(stderr, "neaptide %s: %s\n", method, text.c_str());
    return;
  }
  const py::gil_scoped_acquire locked;
  const py::error_scope pending;  // an exception may be on its way meanwhile
  try {
    py::module_::import("logging").attr("getLogger")("neaptide").attr(method)("%s", text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("neaptide's log");
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  const py::object torch_out_of_memory = py::module_::import("torch").attr("OutOfMemoryError");
  const auto type = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
  g_errors.error = new_error(module, "Error", "What Neaptide raises.", py::make_tuple(type(PyExc_RuntimeError)));
  g_errors.user_error = new_error(module, "UserError", "Something the caller can mend; the text says what and how.",
                                  py::make_tuple(type(g_errors.error), type(PyExc_ValueError)));
  g_errors.out_of_memory = new_error(module, "OutOfMemory", "Memory ran out; says what was asked and what was free.",
                                     py::make_tuple(type(g_errors.error), torch_out_of_memory));
  g_errors.internal_error = new_error(module, "InternalError", "An invariant is broken: a bug of Neaptide.",
                                      py::make_tuple(type(g_errors.error)));
  py::register_local_exception_translator(&translate);
  set_error_converter(&throw_through_torch);
}

void raise_user_error(const std::string& text) {
  PyErr_SetString(g_errors.user_error, text.c_str());
  throw py::error_already_set();
}

Bytes to_bytes(py::handle value, const std::string& what) {
  if (py::isinstance<py::str>(value) || (PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr()))) {
    return parse_bytes(py::str(value).cast<std::string>(), what);
  }
  NEAP_USER_ERROR("[", what, "] expected a number of bytes, or a text such as 64MiB; found ",
                  py::repr(value).cast<std::string>());
}

bool to_bool(py::handle value, const std::string& what) {
  NEAP_CHECK(PyBool_Check(value.ptr()), "[", what, "] expected True or False; found ",
             py::repr(value).cast<std::string>());
  return value.is(py::handle(Py_True));
}

}  // namespace neap::python

PYBIND11_MODULE(_C, module) {
  // First: importing torch sets up the autograd engine that ours goes in front of.
  neap::python::py::module_::import("torch");
  module.attr("built_with_torch") = TORCH_VERSION;
  neap::python::bind_errors(module);
  neap::python::bind_units(module);
  neap::python::bind_offload(module);
  neap::python::bind_shard(module);
  neap::python::bind_checkpoint(module);
  neap::python::bind_sim(module);
  neap::set_wait_hooks(&neap::python::kWaitHooks);
  neap::set_log_sink(&neap::python::log_to_python);
  neap::autograd::install_saved_tensor_hooks();
}
