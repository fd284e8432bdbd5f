// torch-free
// A random order of 0 … size-1 that needs no table: entry i is computed, so an epoch of a billion sequences costs no
// memory and a run can begin in the middle of it.
//
// A Feistel network permutes the smallest even-bit power of two that holds `size`; values outside are walked on until
// they fall inside (fewer than four rounds on average). Thread-safe: immutable.
#pragma once

#include <array>
#include <cstdint>

namespace neap::train {

class Permutation {
 public:
  // REQUIRES: size > 0.
  Permutation(int64_t size, uint64_t seed, uint64_t epoch);

  int64_t size() const { return size_; }

  // REQUIRES: 0 <= i < size().
  int64_t operator()(int64_t i) const;

 private:
  uint64_t encrypt(uint64_t value) const;

  int64_t size_;
  int half_bits_;
  uint64_t half_mask_;
  std::array<uint64_t, 4> round_keys_;
};

}  // namespace neap::train
