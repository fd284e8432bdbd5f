#include "neap/comm/cuda/nccl_group.h"

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>
#include <vector>

namespace neap::comm::cuda {
namespace {

at::Tensor flat(const at::Tensor& tensor) { return tensor.view({-1}); }

class NcclGroup final : public internal::DeviceGroup {
 public:
  explicit NcclGroup(c10::intrusive_ptr<c10d::ProcessGroupNCCL> group) : group_(std::move(group)) {}

  void all_gather(const at::Tensor& full, const at::Tensor& mine) override {
    at::Tensor to = flat(full), from = flat(mine);
    // Of NCCL's own streams; wait() puts the current one behind it and does not block the host.
    group_->_allgather_base(to, from)->wait();
  }
  void all_to_all(const at::Tensor& rows, const at::Tensor& full) override {
    at::Tensor to = flat(rows), from = flat(full);
    std::vector<int64_t> equal;
    group_->alltoall_base(to, from, equal, equal)->wait();
  }
  void reduce_scatter_sum(const at::Tensor& mine, const at::Tensor& full) override {
    at::Tensor to = flat(mine), from = flat(full);
    group_->_reduce_scatter_base(to, from)->wait();
  }
  void all_reduce_sum(const at::Tensor& tensor) override { all_reduce(tensor, c10d::ReduceOp::SUM); }
  void all_reduce_max(const at::Tensor& tensor) override { all_reduce(tensor, c10d::ReduceOp::MAX); }
  void broadcast(const at::Tensor& tensor, int root) override {
    std::vector<at::Tensor> one{flat(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    group_->broadcast(one, options)->wait();
  }
  void abort() noexcept override {
    try {
      group_->abort();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it is being given up
    }
  }

 private:
  void all_reduce(const at::Tensor& tensor, c10d::ReduceOp op) {
    std::vector<at::Tensor> one{flat(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    group_->allreduce(one, options)->wait();
  }

  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
};

}  // namespace

bool has_nccl() noexcept { return true; }

std::unique_ptr<internal::DeviceGroup> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return std::make_unique<NcclGroup>(
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(options)));
}

}  // namespace neap::comm::cuda
