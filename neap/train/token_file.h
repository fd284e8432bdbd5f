// torch-free
// A file of tokens, memory-mapped: bare 16 or 32-bit tokens (nanoGPT), llm.c's format, or any text as bytes.
//
// Little-endian. Opening checks the header and the length, so that a truncated file is found before the first step.
// Movable only; reading is thread-safe. The file must not shrink while it is open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "neap/train/config.h"

namespace neap::train {

class TokenFile {
 public:
  // Throws UserError naming the file: missing, not a file, empty, truncated, a wrong header.
  static TokenFile open(const std::filesystem::path& path, DataFormat format = DataFormat::kAutomatic,
                        TokenType token_type = TokenType::kUint16);

  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;
  ~TokenFile();

  // In tokens.
  int64_t size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }

  // Copies tokens begin … begin + out.size() - 1. REQUIRES: they lie inside the file.
  void read(int64_t begin, std::span<int64_t> out) const;

  // Throws UserError when a token is not below `vocabulary`. Reads the whole file once.
  void check_vocabulary(int64_t vocabulary) const;

 private:
  TokenFile() = default;
  void unmap() noexcept;
  template <class Function>
  auto visit(Function&& function) const;

  std::string name_;
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  size_t offset_ = 0;  // of the first token
  int width_ = 1;      // bytes of one token
  int64_t size_ = 0;
};

}  // namespace neap::train
