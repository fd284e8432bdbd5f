// torch-free
// The index of a Megatron token file: what lies in NAME.bin is told by NAME.idx beside it.
//
// Little-endian and without padding: "MMIDIDX\0\0", u64 version 1, u8 type of the tokens, u64 sequences S, u64 entries
// D, i32 lengths[S] in tokens, i64 pointers[S] in bytes, i64 documents[D], the sequence each document begins with and S
// at the end (Megatron-LM, megatron/core/datasets/indexed_dataset.py).
//
// All of it is checked against itself and against the size of NAME.bin. Here sequences have to lie in NAME.bin one
// after the other, as Megatron's own tools write them, so that NAME.bin is one run of tokens and nothing of the index
// is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "neap/train/config.h"

namespace neap::train {

struct MegatronPaths {
  std::filesystem::path bin, idx;
};
// Of NAME.bin, NAME.idx or NAME, as Megatron names them.
MegatronPaths megatron_paths(const std::filesystem::path& path);

struct MegatronIndex {
  TokenType type;
  int64_t sequences;
  int64_t documents;
  int64_t tokens;
};

// Reads the index whole, once, in constant memory. UserError naming the file, what was expected there and what was
// found.
MegatronIndex read_megatron_index(const MegatronPaths& paths, int64_t bin_bytes);

}  // namespace neap::train
