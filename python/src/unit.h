// Units made of Python modules.
#pragma once

#include "neap/autograd/hook_point.h"
#include "python/src/bind.h"

namespace neap::python {

// The hook point of one module; the module's calls come through run().
class Unit {
 public:
  py::object run(const py::object& forward, const py::tuple& args, const py::dict& kwargs);

  autograd::HookPoint& point() { return point_; }

  // Of a unit that is sharded: its forward may not pass by the hooks.
  bool needs_hooks = false;
  // Its backward reads no parameters, such as that of an embedding.
  bool reads_no_parameters = false;

 private:
  autograd::HookPoint point_;
};

}  // namespace neap::python
