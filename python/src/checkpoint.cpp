// neaptide._C: checkpoints of tensors in pieces.
#include <pybind11/stl.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/reader.h"
#include "neap/checkpoint/saver.h"
#include "neap/comm/world.h"
#include "neap/files/tensor_bytes.h"
#include "python/src/arguments.h"
#include "python/src/bind.h"

namespace neap::python {
namespace {

std::vector<checkpoint::Piece> to_checkpoint(const std::vector<PieceTuple>& pieces) {
  std::vector<checkpoint::Piece> given;
  for (const auto& [name, full_size, begin, end, data] : pieces) given.push_back({name, full_size, begin, end, data});
  return given;
}

void save_checkpoint(comm::World& world, const std::string& dir, int64_t step, int64_t keep_last,
                     const std::vector<PieceTuple>& pieces, checkpoint::State state) {
  checkpoint::SaverOptions options;
  options.keep_last = keep_last;
  checkpoint::Saver saver(dir, options, &world);
  saver.save(step, to_checkpoint(pieces), std::move(state));
}

// Name: (dtype, shape).
std::map<std::string, std::pair<c10::ScalarType, std::vector<int64_t>>> tensors_of(checkpoint::Reader& reader) {
  std::map<std::string, std::pair<c10::ScalarType, std::vector<int64_t>>> tensors;
  for (const auto& [name, tensor] : reader.index().tensors) {
    tensors.emplace(name, std::pair(files::to_torch(tensor.type), tensor.full_size));
  }
  return tensors;
}

void load_checkpoint(checkpoint::Reader& reader, comm::World& world, const std::vector<PieceTuple>& pieces,
                     const std::set<std::string>& may_stay) {
  checkpoint::load(reader, to_checkpoint(pieces), &world,
                   [&](const std::string& name) { return may_stay.contains(name); });
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("save_checkpoint", &save_checkpoint, py::arg("world"), py::arg("dir"), py::arg("step"),
             py::arg("keep_last"), py::arg("pieces"), py::arg("state"), unlocked);
  py::class_<checkpoint::Reader>(module, "CheckpointReader")
      .def(py::init([](const std::string& path) {
             return std::make_unique<checkpoint::Reader>(checkpoint::checkpoint_at(path));
           }),
           py::arg("path"), unlocked)
      .def("tensors", &tensors_of, unlocked)
      .def("load", &load_checkpoint, py::arg("world"), py::arg("pieces"), py::arg("may_stay"), unlocked);
}

}  // namespace neap::python
