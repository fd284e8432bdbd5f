// A Group's collectives over a DeviceGroup: what the library has no call for, made of what it has. Operators run on the
// thread's current stream, as the library's calls do.
//
// Ordered reductions bring all rows to the rank that adds them (all to all for a scatter, a gather for an all-reduce)
// and add in rank order as on the host: the bits of neap/comm/group.h, for the price of memory as large as the full
// buffer.
#pragma once

#include "neap/comm/internal/device_group.h"
#include "neap/comm/internal/reduce_rows.h"

namespace neap::comm::internal {

void reduce_scatter_on(DeviceGroup& library, const at::Tensor& mine, const at::Tensor& full, const RowReduction& how,
                       bool ordered);
void all_reduce_on(DeviceGroup& library, const at::Tensor& tensor, const RowReduction& how, bool ordered);

}  // namespace neap::comm::internal
