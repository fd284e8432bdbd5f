// torch-free
// A file of tokens, memory-mapped: bare tokens (nanoGPT), llm.c's format, Megatron's .bin with its .idx, or any text as
// bytes.
//
// Little-endian. Opening checks header, index and length, so that a truncated file is found before the first step. What
// has been read leaves the process again: its memory does not grow with the file. Movable only; reading is
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "neap/base/mapped_file.h"
#include "neap/train/config.h"

namespace neap::train {

class TokenFile {
 public:
  // `token_type` is of bare tokens alone; the other formats say it themselves. Throws UserError naming the file:
  // missing, not a file, empty, truncated, a wrong header or index.
  static TokenFile open(const std::filesystem::path& path, DataFormat format = DataFormat::kAutomatic,
                        TokenType token_type = TokenType::kUint16);

  // In tokens.
  int64_t size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }
  TokenType type() const noexcept { return type_; }

  // Copies tokens begin … begin + out.size() - 1. UserError when the file has become shorter since it was opened.
  // REQUIRES: they lie inside the file.
  void read(int64_t begin, std::span<int64_t> out) const;

  // Whether `token` is anywhere in the file. Reads up to the first one.
  bool contains(int64_t token) const;

  // Throws UserError when a token is not from 0 to `vocabulary` - 1. Reads the whole file once.
  void check_vocabulary(int64_t vocabulary) const;

 private:
  TokenFile(std::string name, MappedFile file) : name_(std::move(name)), file_(std::move(file)) {}
  // Calls function(pointer to the first token in its own type).
  template <class Function>
  decltype(auto) visit(Function&& function) const;
  // Calls function(tokens, begin, end) for one piece of the file after the other, until it returns false.
  template <class Function>
  void scan(Function&& function) const;
  // Tokens that will be read soon, and that have been.
  void announce(int64_t begin, int64_t count) const noexcept;
  void release(int64_t begin, int64_t count) const noexcept;

  std::string name_;
  MappedFile file_;
  size_t offset_ = 0;  // of the first token
  TokenType type_ = TokenType::kUint8;
  int64_t size_ = 0;
};

}  // namespace neap::train
