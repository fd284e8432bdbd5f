// torch-free
#include "neap/comm/internal/call_header.h"

#include <algorithm>
#include <cstddef>

#include "neap/base/error.h"

namespace neap::comm::internal {
namespace {

std::string_view text(std::span<const char> field) {
  return {field.data(), static_cast<size_t>(std::find(field.begin(), field.end(), '\0') - field.begin())};
}

}  // namespace

void set_text(std::span<char> field, std::string_view value) {
  std::fill(field.begin(), field.end(), '\0');
  std::copy_n(value.begin(), std::min(value.size(), field.size() - 1), field.begin());
}

// FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv/
uint64_t hash_bytes(std::span<const std::byte> bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

uint64_t hash_pieces(std::span<const int64_t> offsets) { return hash_bytes(std::as_bytes(offsets)); }

void CallHeader::set_unit(std::string_view label) {
  set_text(unit, label);
  unit_hash = hash_bytes(std::as_bytes(std::span(label)));
}

std::string describe(const CallHeader& header) {
  const auto op = text(header.op);
  std::string what = neap::internal::concat(text(header.kind), op.empty() ? "" : " (", op, op.empty() ? "" : ")",
                                            " of '", text(header.unit), "'");
  if (text(header.dtype).empty()) return what;  // a barrier has no payload
  what += neap::internal::concat(", ", header.elements, " elements of ", text(header.dtype));
  if (header.root >= 0) what += neap::internal::concat(", from rank ", header.root);
  if (header.factor != 1) what += neap::internal::concat(", factor ", header.factor);
  return what;
}

std::optional<std::string> difference(const CallHeader& mine, const CallHeader& theirs) {
  if (theirs.magic != CallHeader::kMagic) return "it runs another version of this program";
  const std::string a = describe(mine), b = describe(theirs);
  if (a != b) return neap::internal::concat("it called ", b, ", this rank called ", a);
  if (mine.pieces != theirs.pieces)
    return neap::internal::concat("both called ", a, ", but cut the buffer differently");
  if (mine.unit_hash != theirs.unit_hash)
    return neap::internal::concat("both called ", a, ", but the labels differ further on");
  if (mine.factor != theirs.factor) return neap::internal::concat("both called ", a, ", but with factors that differ");
  if (mine.number != theirs.number)
    return neap::internal::concat("both called ", a, ", but as collective number ", theirs.number, " and ",
                                  mine.number);
  return std::nullopt;
}

}  // namespace neap::comm::internal
