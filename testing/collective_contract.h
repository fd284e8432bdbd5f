// What a Group promises, checked on any transport and device: every collective with every dtype, even, uneven and empty
// pieces, in place and not. Every member of the group calls it.
//
// A contract rather than a test, because the same checks run where ranks are threads, on sim and over Gloo in processes
// of their own that have no test framework.
#pragma once

#include <c10/core/Device.h>

#include "neap/comm/group.h"

namespace neap::testing {

// Throws Error that names the first promise found broken.
void check_collectives(comm::Group& group, c10::Device device);

}  // namespace neap::testing
