// torch-free
#include "neap/train/permutation.h"

#include <bit>

#include "neap/base/error.h"

namespace neap::train {
namespace {

// splitmix64's finaliser: every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t epoch) : size_(size) {
  NEAP_ASSERT(size > 0, "a permutation of ", size, " entries");
  const int bits = std::max(2, static_cast<int>(std::bit_width(static_cast<uint64_t>(size) - 1)));
  half_bits_ = (bits + 1) / 2;
  half_mask_ = (uint64_t{1} << half_bits_) - 1;
  uint64_t state = mix(mix(seed) ^ epoch);
  for (uint64_t& key : round_keys_) key = state = mix(state);
}

uint64_t Permutation::encrypt(uint64_t value) const {
  uint64_t left = value >> half_bits_;
  uint64_t right = value & half_mask_;
  for (const uint64_t key : round_keys_) {
    const uint64_t next = left ^ (mix(right ^ key) & half_mask_);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

int64_t Permutation::operator()(int64_t i) const {
  NEAP_ASSERT(i >= 0 && i < size_, "entry ", i, " of ", size_);
  uint64_t value = static_cast<uint64_t>(i);
  do value = encrypt(value);
  while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

}  // namespace neap::train
