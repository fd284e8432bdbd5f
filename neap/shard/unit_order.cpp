// torch-free
#include "neap/shard/unit_order.h"

namespace neap::shard {

int UnitOrder::advance(int unit) {
  if (at_ == kLongestPass) restart();  // forward passes without an end that we would see
  if (at_ < order_.size() && order_[at_] != unit) order_.resize(at_);
  if (at_ == order_.size()) order_.push_back(unit);
  ++at_;
  return at_ < order_.size() ? order_[at_] : kUnknown;
}

}  // namespace neap::shard
