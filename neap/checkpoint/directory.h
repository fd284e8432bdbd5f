// torch-free
// A directory of checkpoints: which there are, which is the newest, which have to go.
//
//   step-00000020/       a complete one: it gets its name when everything in it is on the disk
//   .step-00000030.partial/   a save in flight, or what one that was interrupted has left; never chosen
//
// One run at a time writes to it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "neap/files/file_system.h"

namespace neap::checkpoint {

std::string step_name(int64_t step);  // "step-00000020"
// The other way round; nothing for a name that is not of this kind.
std::optional<int64_t> step_of(const std::filesystem::path& checkpoint);

// Those with an index, by their step. One without, which no save leaves, is passed over with a warning.
std::vector<std::filesystem::path> complete_checkpoints(const std::filesystem::path& dir);
std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& dir);

// `path` itself when it is a checkpoint, else the newest one in it; UserError when there is none.
std::filesystem::path checkpoint_at(const std::filesystem::path& path);

// Removes the oldest complete ones so that `keep_last` stay; 0 keeps all.
void remove_old(const std::filesystem::path& dir, int64_t keep_last, files::FileSystem& system);
// Removes what interrupted saves have left.
void remove_partial(const std::filesystem::path& dir, files::FileSystem& system);

}  // namespace neap::checkpoint
