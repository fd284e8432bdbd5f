#include "neap/checkpoint/directory.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/checkpoint/index.h"
#include "neap/files/atomic_directory.h"

namespace neap::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";

}  // namespace

std::string step_name(int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return name;
}

std::optional<int64_t> step_of(const fs::path& checkpoint) {
  const std::string name = checkpoint.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && stop == end && step >= 0 ? std::optional(step) : std::nullopt;
}

std::vector<fs::path> complete_checkpoints(const fs::path& dir) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const auto step = step_of(entry.path());
    if (!step) continue;
    if (fs::exists(entry.path() / kIndexName, error)) {
      found.emplace_back(*step, entry.path());
    } else {
      log_warning(entry.path().string(), " is passed over: it has no ", kIndexName, ", so it is no whole checkpoint");
    }
  }
  std::ranges::sort(found);
  std::vector<fs::path> paths;
  paths.reserve(found.size());
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::optional<fs::path> newest_checkpoint(const fs::path& dir) {
  const std::vector<fs::path> all = complete_checkpoints(dir);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

fs::path checkpoint_at(const fs::path& path) {
  std::error_code error;
  if (fs::exists(path / kIndexName, error)) return path;
  NEAP_CHECK(fs::is_directory(path, error), "[checkpoint] expected a checkpoint, or a directory of them, at ",
             path.string(), "; found ",
             fs::exists(path, error) ? "a file"
             : error                 ? error.message()
                                     : "nothing");
  const auto newest = newest_checkpoint(path);
  NEAP_CHECK(newest.has_value(), "[checkpoint] expected a checkpoint at ", path.string(), "; found neither ",
             kIndexName, " nor a directory ", step_name(0),
             " or the like with one; a save that was interrupted leaves none");
  return *newest;
}

void remove_old(const fs::path& dir, int64_t keep_last, files::FileSystem& system) {
  if (keep_last <= 0) return;
  const std::vector<fs::path> all = complete_checkpoints(dir);
  const int64_t surplus = static_cast<int64_t>(all.size()) - keep_last;
  for (int64_t i = 0; i < surplus; ++i) files::remove_whole(all[static_cast<std::size_t>(i)], system);
}

void remove_partial(const fs::path& dir, files::FileSystem& system) {
  std::error_code error;
  std::vector<fs::path> partial;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("." + std::string(kPrefix)) && name.find(".partial") != std::string::npos) {
      partial.push_back(entry.path());
    }
  }
  for (const fs::path& path : partial) system.remove(path);
}

}  // namespace neap::checkpoint
