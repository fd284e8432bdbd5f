// torch-free
// The types a token can have in a file, and code that is written once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "neap/train/config.h"

namespace neap::train {

// Calls function(pointer to the tokens in their own type). REQUIRES: `tokens` is aligned to that type.
template <class Function>
decltype(auto) visit_tokens(TokenType type, const std::byte* tokens, Function&& function) {
  switch (type) {
    case TokenType::kUint8:
      return function(reinterpret_cast<const uint8_t*>(tokens));
    case TokenType::kInt8:
      return function(reinterpret_cast<const int8_t*>(tokens));
    case TokenType::kUint16:
      return function(reinterpret_cast<const uint16_t*>(tokens));
    case TokenType::kInt16:
      return function(reinterpret_cast<const int16_t*>(tokens));
    case TokenType::kUint32:
      return function(reinterpret_cast<const uint32_t*>(tokens));
    case TokenType::kInt32:
      return function(reinterpret_cast<const int32_t*>(tokens));
    case TokenType::kInt64:
      break;
  }
  return function(reinterpret_cast<const int64_t*>(tokens));
}

// In bytes.
inline int64_t size_of(TokenType type) {
  return visit_tokens(type, nullptr, [](const auto* tokens) { return static_cast<int64_t>(sizeof *tokens); });
}

}  // namespace neap::train
