// Who writes what: ranks tell each other what they hold, and each piece that several of them hold goes to one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "neap/checkpoint/index.h"
#include "neap/checkpoint/piece.h"

namespace neap::checkpoint::internal {

// What a rank tells of its pieces. UserError for pieces that no checkpoint can hold.
std::string manifest_of(const std::vector<Piece>& pieces);

struct Division {
  Index index;                                 // but for checksums and sizes of files
  std::vector<std::vector<std::size_t>> mine;  // of each rank: which of its pieces it writes, in the order of its file
};

// The same on every rank. A piece goes to the holder that has the least to write so far. UserError when ranks disagree
// about a tensor, or some of its elements lie nowhere.
Division divide(const std::vector<std::string>& manifests);

}  // namespace neap::checkpoint::internal
