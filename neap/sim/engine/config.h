// torch-free
// Does a description of a device make sense?
#pragma once

#include "neap/sim/control.h"

namespace neap::sim {

// UserError that names the field, the value and the valid range.
void check_config(const DeviceConfig& config);

}  // namespace neap::sim
