// What Python code hands over, on its way into the library, and what it is handed out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "neap/base/bytes.h"
#include "python/src/bind.h"

namespace neap::python {

// A function of Python's that may be dropped on any thread, and after the interpreter's end.
class Callable {
 public:
  explicit Callable(py::object function)
      : function_(new py::object(std::move(function)), [](py::object* held) {
          if (Py_IsInitialized() == 0 || _Py_IsFinalizing()) {
            held->release();
          } else {
            const py::gil_scoped_acquire locked;
            held->dec_ref();
            held->release();
          }
          delete held;
        }) {}
  const py::object& operator*() const { return *function_; }

 private:
  std::shared_ptr<py::object> function_;
};

// A piece of a tensor: its name, the size of the whole, the first element and the one after the last, and these.
using PieceTuple = std::tuple<std::string, std::vector<int64_t>, int64_t, int64_t, at::Tensor>;

// `what` is named in errors: "offload.pin".
bool to_bool(py::handle value, const std::string& what);

template <class Object, class... Options>
void def_bytes(py::class_<Object, Options...>& type, const char* name, Bytes Object::*member) {
  type.def_property_readonly(name, [member](const Object& object) { return (object.*member).count; });
}

}  // namespace neap::python
