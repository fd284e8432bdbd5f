// torch-free
// What a rank says ahead of every collective: which one it is about to do. Equal on all ranks of a right program.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace neap::comm::internal {

// Goes over the wire as it is: both sides are the same program on the same kind of machine, and `magic` tells if not.
struct CallHeader {
  static constexpr uint32_t kMagic = 0x4e454131;  // changes with the layout

  uint32_t magic = kMagic;
  int32_t root = -1;       // of a broadcast
  uint64_t number = 0;     // of the collective, counted per group
  int64_t elements = 0;    // of the full buffer
  uint64_t pieces = 0;     // hash of how it is cut
  uint64_t unit_hash = 0;  // of the whole label
  double factor = 1;
  std::array<char, 16> kind{};  // "all_gather"
  std::array<char, 16> op{};    // of a reduction
  std::array<char, 16> dtype{};
  std::array<char, 64> unit{};  // the label's beginning

  void set_unit(std::string_view label);
};
static_assert(std::is_trivially_copyable_v<CallHeader>);

void set_text(std::span<char> field, std::string_view text);  // cut to the field, the rest zero
uint64_t hash_bytes(std::span<const std::byte> bytes);
uint64_t hash_pieces(std::span<const int64_t> offsets);

// "reduce_scatter (sum) of 'layers.3', 4096 elements of float32"
std::string describe(const CallHeader& header);
// What distinguishes the two, for people; empty when nothing does.
std::optional<std::string> difference(const CallHeader& mine, const CallHeader& theirs);

}  // namespace neap::comm::internal
