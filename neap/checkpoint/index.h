// torch-free
// The index of a checkpoint: index.json, written last. What the tensors are, where their pieces lie, and all that is no
// tensor.
//
// A checkpoint is a directory: the index, and a safetensors file for each rank that saved it, in which a piece of a
// tensor is a one-dimensional entry of the tensor's name. (Rank files say in their metadata what they hold, too.)
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "neap/files/safetensors.h"

namespace neap::checkpoint {

inline constexpr const char* kIndexName = "index.json";
inline constexpr const char* kFormat = "neaptide checkpoint";
inline constexpr int kVersion = 1;

// What is no tensor, as text: step, position in the data, configuration.
using State = std::map<std::string, std::string>;

struct IndexPiece {
  int file = 0;                // into Index::files
  int64_t begin = 0, end = 0;  // elements of the flattened tensor
  std::string checksum;        // of the piece's bytes (files/checksum.h)
};

struct IndexTensor {
  files::SafeType type = files::SafeType::kF32;
  std::vector<int64_t> full_size;
  std::vector<IndexPiece> pieces;  // by where they begin; none is empty

  int64_t numel() const;
};

struct IndexFile {
  std::string name;
  int64_t bytes = 0;
};

struct Index {
  int world = 1;  // ranks that saved it
  State state;
  std::vector<IndexFile> files;  // one for each rank
  std::map<std::string, IndexTensor> tensors;
};

std::string file_of_rank(int rank);  // "rank-00003.safetensors"

// UserError with the names of tensors of which some elements lie nowhere; `place` says of what.
void check_cover(const Index& index, const std::string& place);

// Deterministic: equal indices are equal texts.
std::string to_json(const Index& index);

// Reads and checks it whole: damage anywhere in it, another format or a later version are UserErrors that name the
// file.
Index read_index(const std::filesystem::path& file);

}  // namespace neap::checkpoint
