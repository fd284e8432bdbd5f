// torch-free
#include "neap/sim/engine/stream.h"

#include "neap/base/error.h"

namespace neap::sim {

Stream::Stream(int device, int id, int index)
    : device_(device),
      id_(id),
      index_(index),
      name_(internal::concat("sim:", device, " stream ", id)),
      track_(id == 0 ? internal::concat("sim:", device, "/compute")
                     : internal::concat("sim:", device, "/stream ", id)) {}

}  // namespace neap::sim
