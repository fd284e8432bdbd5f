#include "neap/files/checksum.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace neap::files {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

template <class Word>
uint64_t load(const std::byte* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

uint64_t round(uint64_t lane, uint64_t input) { return std::rotl(lane + input * kPrime2, 31) * kPrime1; }
uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

void Checksum::consume(const std::byte* stripe) {
  for (std::size_t i = 0; i < 4; ++i) lanes_[i] = round(lanes_[i], load<uint64_t>(stripe + 8 * i));
}

void Checksum::update(std::span<const std::byte> bytes) {
  total_ += bytes.size();
  if (pending_size_ > 0) {
    const std::size_t taken = std::min(kStripe - pending_size_, bytes.size());
    std::copy_n(bytes.begin(), taken, pending_.begin() + static_cast<std::ptrdiff_t>(pending_size_));
    pending_size_ += taken;
    bytes = bytes.subspan(taken);
    if (pending_size_ < kStripe) return;
    consume(pending_.data());
    pending_size_ = 0;
  }
  for (; bytes.size() >= kStripe; bytes = bytes.subspan(kStripe)) consume(bytes.data());
  std::ranges::copy(bytes, pending_.begin());
  pending_size_ = bytes.size();
}

uint64_t Checksum::value() const {
  uint64_t hash = kPrime5;
  if (total_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) hash = merge(hash, lane);
  }
  hash += total_;
  const std::byte* at = pending_.data();
  std::size_t left = pending_size_;
  for (; left >= 8; at += 8, left -= 8) {
    hash = std::rotl(hash ^ round(0, load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ load<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
    left -= 4;
  }
  for (; left > 0; ++at, --left) hash = std::rotl(hash ^ static_cast<uint64_t>(*at) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

std::string checksum_text(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string checksum_text(std::span<const std::byte> bytes) {
  Checksum checksum;
  checksum.update(bytes);
  return checksum_text(checksum.value());
}

std::string checksum_text(std::string_view bytes) { return checksum_text(std::as_bytes(std::span(bytes))); }

}  // namespace neap::files
