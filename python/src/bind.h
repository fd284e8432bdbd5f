// What the files of the extension module share. One bind_…() per concept; none of them holds logic of its own.
#pragma once

// Pulls in torch's own pybind11: with another one, tensors would not pass.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "neap/base/bytes.h"

namespace neap::python {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_units(py::module_& module);
void bind_offload(py::module_& module);
void bind_shard(py::module_& module);
void bind_sim(py::module_& module);

// neaptide.UserError, for what Python code was asked for and did wrong.
[[noreturn]] void raise_user_error(const std::string& text);

// A number of bytes as Python gives it: an int, or a text such as "64MiB". `what` is named in errors.
Bytes to_bytes(py::handle value, const std::string& what);

}  // namespace neap::python
