// torch-free
// A number of bytes as a type of its own, so that a size is never mistaken for a count.
#pragma once

#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

namespace neap {

struct Bytes {
  int64_t count = 0;

  constexpr Bytes() = default;
  constexpr explicit Bytes(int64_t n) : count(n) {}

  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr Bytes& operator+=(Bytes other) { return count += other.count, *this; }
  constexpr Bytes& operator-=(Bytes other) { return count -= other.count, *this; }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return Bytes(a.count + b.count); }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return Bytes(a.count - b.count); }
  constexpr double mib() const { return static_cast<double>(count) / (1 << 20); }
};

// "1.50 GiB", "12.00 MiB", "640 B": for people.
std::string to_string(Bytes bytes);
std::ostream& operator<<(std::ostream& out, Bytes bytes);

// Accepts "0", "1048576", "512KiB", "1.5 GiB", "2GB" (powers of ten); negative, NaN, overflowing or unknown units are
// UserErrors that name `what` (an option's path), the value and the accepted forms.
Bytes parse_bytes(std::string_view text, std::string_view what);

namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return Bytes(static_cast<int64_t>(n)); }
constexpr Bytes operator""_KiB(unsigned long long n) { return Bytes(static_cast<int64_t>(n) << 10); }
constexpr Bytes operator""_MiB(unsigned long long n) { return Bytes(static_cast<int64_t>(n) << 20); }
constexpr Bytes operator""_GiB(unsigned long long n) { return Bytes(static_cast<int64_t>(n) << 30); }
}  // namespace literals

}  // namespace neap
