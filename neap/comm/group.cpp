#include "neap/comm/group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>

#include <cstring>
#include <numeric>
#include <utility>

#include "neap/base/error.h"
#include "neap/comm/internal/group_core.h"
#include "neap/comm/internal/library_collectives.h"
#include "neap/comm/internal/reduce_rows.h"
#include "neap/device/copy.h"
#include "neap/device/device.h"
#include "neap/device/host_task.h"

namespace neap::comm {
namespace {

using internal::Call;
using internal::Exchange;
using internal::ReduceRows;
using internal::RowReduction;
using neap::internal::concat;

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMax:
      return "maximum";
  }
  return "";
}

std::string label(Collective kind, std::string_view unit) { return concat(comm::to_string(kind), " of '", unit, "'"); }

void check_tensor(const at::Tensor& tensor, const std::string& what) {
  NEAP_CHECK(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous(), "[comm] ", what,
             " expected a contiguous tensor; found ",
             tensor.defined() ? concat("strides ", tensor.strides(), " of sizes ", tensor.sizes()) : "none");
  NEAP_CHECK(!tensor.is_meta(), "[comm] ", what, " expected a tensor with memory; found one on meta");
}

Bytes bytes_of(const at::Tensor& tensor) { return Bytes(static_cast<int64_t>(tensor.nbytes())); }
std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

// Where each piece begins, in elements, and the end.
std::vector<int64_t> cut(int64_t elements, Pieces pieces, int ranks, const std::string& what) {
  std::vector<int64_t> cuts(static_cast<size_t>(ranks) + 1, 0);
  if (pieces.empty()) {
    NEAP_CHECK(elements % ranks == 0, "[comm] ", what, " expected elements that divide by the ", ranks,
               " ranks, or the sizes of the pieces; found ", elements);
    for (int r = 0; r <= ranks; ++r) cuts[static_cast<size_t>(r)] = elements / ranks * r;
    return cuts;
  }
  for (const int64_t piece : pieces)
    NEAP_CHECK(piece >= 0, "[comm] ", what, " expected pieces of no less than 0 elements; found ", piece);
  std::partial_sum(pieces.begin(), pieces.end(), cuts.begin() + 1);
  NEAP_CHECK(std::ssize(pieces) == ranks && cuts.back() == elements, "[comm] ", what, " expected ", ranks,
             " pieces of ", elements, " elements in all; found ", pieces.size(), " of ", cuts.back());
  return cuts;
}

std::vector<int64_t> in_bytes(std::vector<int64_t> cuts, int64_t unit) {
  for (int64_t& at : cuts) at *= unit;
  return cuts;
}

// The host cannot reach the memory, nor run in the order of the device's streams.
bool needs_library(const at::Tensor& tensor) {
  return !tensor.is_cpu() && !device::has_host_task_launcher(tensor.device().type());
}

Call make_call(Collective kind, std::string_view unit, const at::Tensor& full) {
  Call call;
  call.kind = kind;
  call.unit = unit;
  call.bytes = bytes_of(full);
  call.memory.push_back(full.storage());
  call.header.elements = full.numel();
  call.header.set_unit(unit);
  internal::set_text(call.header.kind, comm::to_string(kind));
  internal::set_text(call.header.dtype, c10::toString(full.scalar_type()));
  return call;
}

void add_reduction(Call& call, const Reduction& reduction) {
  internal::set_text(call.header.op, to_string(reduction.op));
  call.header.factor = reduction.factor;
}

void add_range(Call& call, const at::Tensor& tensor, int64_t begin, int64_t bytes, bool write) {
  if (bytes > 0) call.ranges.push_back({static_cast<const std::byte*>(tensor.const_data_ptr()) + begin, bytes, write});
}

ReduceRows reduce_into(const RowReduction& how, std::byte* result) {
  const auto row = static_cast<int64_t>(c10::elementSize(how.rows));
  const auto unit = static_cast<int64_t>(c10::elementSize(how.result));
  return [how, result, row, unit](std::span<const std::byte* const> rows, int64_t offset, int64_t bytes) {
    internal::reduce_rows(how, rows, result + offset / row * unit, bytes / row);
  };
}

// ---- one rank: at most a copy, on the current stream

void copy_alone(const at::Tensor& to, const at::Tensor& from) {
  auto& device = device::Device::of(to);
  if (!device.asynchronous()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    return;
  }
  const auto flat = [](const at::Tensor& t) {
    return device::byte_view(t.storage(), t.storage_offset() * t.element_size(), static_cast<int64_t>(t.nbytes()));
  };
  device::copy_bytes_async(flat(to), flat(from), device.current_stream());
}

void reduce_alone(const at::Tensor& mine, const at::Tensor& full, const RowReduction& how) {
  const bool as_it_is = how.reduction.factor == 1 && how.rows == how.result;
  if (as_it_is && mine.const_data_ptr() == full.const_data_ptr()) return;
  if (as_it_is) return copy_alone(mine, full);
  if (!device::Device::of(mine).asynchronous()) {
    const auto* row = static_cast<const std::byte*>(full.const_data_ptr());
    return internal::reduce_rows(how, std::span(&row, 1), data_of(mine), full.numel());
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool wide = how.rows == at::kDouble || how.result == at::kDouble;
  at::Tensor value = full.view(mine.sizes()).to(wide ? at::kDouble : at::kFloat);
  if (how.reduction.factor != 1) value = at::mul(value, how.reduction.factor);
  mine.copy_(value);
}

}  // namespace

const char* to_string(Collective kind) {
  switch (kind) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kBarrier:
      return "barrier";
  }
  return "";
}

int64_t Counters::calls() const {
  return std::accumulate(std::begin(kinds), std::end(kinds), int64_t{0},
                         [](int64_t sum, const Kind& kind) { return sum + kind.calls; });
}

Group::Group(std::unique_ptr<internal::GroupCore> core) : core_(std::move(core)) {}
Group::~Group() = default;

int Group::rank() const noexcept { return core_->rank(); }
int Group::size() const noexcept { return core_->size(); }
const std::string& Group::name() const noexcept { return core_->name(); }
const std::vector<int>& Group::ranks() const noexcept { return core_->ranks(); }
Counters Group::counters() const { return core_->counters(); }
bool Group::adds_in_rank_order(const at::Tensor& like) const { return !needs_library(like) || core_->ordered(); }
void Group::wait_idle() { core_->wait_idle(); }

Work Group::all_gather(const at::Tensor& full, std::string_view unit, Pieces pieces) {
  return all_gather(full, at::Tensor(), unit, pieces);
}

Work Group::all_gather(const at::Tensor& full, const at::Tensor& mine, std::string_view unit, Pieces pieces) {
  const std::string what = label(Collective::kAllGather, unit);
  check_tensor(full, what);
  core_->check_alive(Collective::kAllGather, unit);
  const auto cuts = in_bytes(cut(full.numel(), pieces, size(), what), full.element_size());
  const int64_t begin = cuts[static_cast<size_t>(rank())], bytes = cuts[static_cast<size_t>(rank()) + 1] - begin;

  Call call = make_call(Collective::kAllGather, unit, full);
  call.header.pieces = internal::hash_pieces(cuts);
  const std::byte* source = nullptr;
  if (mine.defined()) {
    check_tensor(mine, what);
    NEAP_CHECK(
        mine.scalar_type() == full.scalar_type() && mine.device() == full.device() && bytes_of(mine).count == bytes,
        "[comm] ", what, " expected this rank's piece to have ", bytes / full.element_size(), " elements of ",
        full.scalar_type(), " on ", full.device(), "; found ", mine.numel(), " of ", mine.scalar_type(), " on ",
        mine.device());
    const auto* data = static_cast<const std::byte*>(mine.const_data_ptr());
    if (bytes > 0 && data != data_of(full) + begin) source = data;
  }
  call.copied = Bytes(source != nullptr ? bytes : 0);
  if (size() == 1) {
    core_->count(call);
    if (source != nullptr) copy_alone(full, mine);
    return {};
  }
  if (source != nullptr) {
    call.memory.push_back(mine.storage());
    add_range(call, mine, 0, bytes, false);
  }
  add_range(call, full, 0, begin, true);
  add_range(call, full, begin, bytes, source != nullptr);
  add_range(call, full, begin + bytes, call.bytes.count - begin - bytes, true);
  call.wire_bytes = call.bytes - Bytes(bytes);
  call.latencies = size() - 1;
  if (needs_library(full) && pieces.empty()) {
    call.on_library = [full, mine = mine.defined() ? mine : full.view({size(), -1}).select(0, rank())](
                          internal::DeviceGroup& library, bool) { library.all_gather(full, mine); };
  }
  call.body = [to = data_of(full), source, begin, bytes, cuts](Exchange& exchange) {
    if (source != nullptr) std::memcpy(to + begin, source, static_cast<size_t>(bytes));
    exchange.all_gather(to, cuts);
  };
  return core_->start(std::move(call), full.device());
}

Work Group::reduce_scatter(const at::Tensor& mine, const at::Tensor& full, const Reduction& reduction,
                           std::string_view unit, Pieces pieces) {
  const std::string what = label(Collective::kReduceScatter, unit);
  check_tensor(full, what);
  check_tensor(mine, what);
  const RowReduction how{full.scalar_type(), mine.scalar_type(), reduction, size()};
  how.check(what.c_str());
  core_->check_alive(Collective::kReduceScatter, unit);
  const auto cuts = cut(full.numel(), pieces, size(), what);
  const int64_t elements = cuts[static_cast<size_t>(rank()) + 1] - cuts[static_cast<size_t>(rank())];
  NEAP_CHECK(mine.numel() == elements && mine.device() == full.device(), "[comm] ", what,
             " expected a result of this rank's ", elements, " elements on ", full.device(), "; found ", mine.numel(),
             " on ", mine.device());

  Call call = make_call(Collective::kReduceScatter, unit, full);
  add_reduction(call, reduction);
  const int64_t size_of = full.element_size();
  auto offsets = in_bytes(cuts, size_of);
  call.header.pieces = internal::hash_pieces(offsets);
  if (size() == 1) {
    core_->count(call);
    reduce_alone(mine, full, how);
    return {};
  }
  call.memory.push_back(mine.storage());
  add_range(call, full, 0, call.bytes.count, false);
  add_range(call, mine, 0, bytes_of(mine).count, true);
  call.wire_bytes = call.bytes - Bytes(elements * size_of);
  call.latencies = size() - 1;
  if (needs_library(full) && pieces.empty()) {
    call.on_library = [full, mine, how](internal::DeviceGroup& library, bool ordered) {
      internal::reduce_scatter_on(library, mine, full, how, ordered);
    };
  }
  call.body = [from = static_cast<const std::byte*>(full.const_data_ptr()), offsets = std::move(offsets), size_of,
               reduce = reduce_into(how, data_of(mine))](Exchange& exchange) {
    exchange.reduce_scatter(from, offsets, size_of, reduce);
  };
  return core_->start(std::move(call), full.device());
}

Work Group::all_reduce(const at::Tensor& tensor, const Reduction& reduction, std::string_view unit) {
  const std::string what = label(Collective::kAllReduce, unit);
  check_tensor(tensor, what);
  const RowReduction how{tensor.scalar_type(), tensor.scalar_type(), reduction, size()};
  how.check(what.c_str());
  core_->check_alive(Collective::kAllReduce, unit);
  Call call = make_call(Collective::kAllReduce, unit, tensor);
  add_reduction(call, reduction);
  if (size() == 1) {
    core_->count(call);
    reduce_alone(tensor, tensor, how);
    return {};
  }
  add_range(call, tensor, 0, call.bytes.count, true);
  call.wire_bytes = Bytes(2 * (call.bytes.count - call.bytes.count / size()));
  call.latencies = 2 * (size() - 1);
  if (needs_library(tensor)) {
    call.on_library = [tensor, how](internal::DeviceGroup& library, bool ordered) {
      internal::all_reduce_on(library, tensor, how, ordered);
    };
  }
  call.body = [data = data_of(tensor), elements = tensor.numel(), size_of = tensor.element_size(),
               how](Exchange& exchange) {
    exchange.all_reduce(data, elements, size_of, [&](int64_t begin) { return reduce_into(how, data + begin); });
  };
  return core_->start(std::move(call), tensor.device());
}

Work Group::broadcast(const at::Tensor& tensor, int root, std::string_view unit) {
  const std::string what = label(Collective::kBroadcast, unit);
  check_tensor(tensor, what);
  NEAP_CHECK(root >= 0 && root < size(), "[comm] ", what, " expected a root below the group's ", size(),
             " ranks; found ", root);
  core_->check_alive(Collective::kBroadcast, unit);
  Call call = make_call(Collective::kBroadcast, unit, tensor);
  call.header.root = root;
  if (size() == 1) {
    core_->count(call);
    return {};
  }
  add_range(call, tensor, 0, call.bytes.count, rank() != root);
  call.wire_bytes = call.bytes;
  call.latencies = size() - 1;
  if (needs_library(tensor)) {
    call.on_library = [tensor, root](internal::DeviceGroup& library, bool) { library.broadcast(tensor, root); };
  }
  call.body = [data = data_of(tensor), bytes = call.bytes.count, root](Exchange& exchange) {
    exchange.broadcast(data, bytes, root);
  };
  return core_->start(std::move(call), tensor.device());
}

Work Group::barrier(std::string_view unit) {
  core_->check_alive(Collective::kBarrier, unit);
  Call call;
  call.kind = Collective::kBarrier;
  call.unit = unit;
  call.header.set_unit(unit);
  internal::set_text(call.header.kind, comm::to_string(Collective::kBarrier));
  if (size() == 1) {
    core_->count(call);
    return {};
  }
  return core_->start(std::move(call), c10::kCPU);
}

}  // namespace neap::comm
