// torch-free
// XXH64 (Yann Collet; github.com/Cyan4973/xxHash, doc/xxhash_spec.md): a checksum against damage, not against malice,
// that is no slower than memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace neap::files {

class Checksum {
 public:
  void update(std::span<const std::byte> bytes);
  // Of all bytes so far.
  [[nodiscard]] uint64_t value() const;

 private:
  static constexpr std::size_t kStripe = 32;

  void consume(const std::byte* stripe);

  // The spec's accumulators for seed 0.
  std::array<uint64_t, 4> lanes_ = {0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0, 0x61C8864E7A143579};
  std::array<std::byte, kStripe> pending_{};
  std::size_t pending_size_ = 0;
  uint64_t total_ = 0;
};

// 16 hexadecimal digits.
std::string checksum_text(std::span<const std::byte> bytes);
std::string checksum_text(std::string_view bytes);
std::string checksum_text(uint64_t value);

}  // namespace neap::files
