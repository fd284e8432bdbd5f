// torch-free
// Directories and file systems for the tests of checkpoints.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <string>

#include "neap/base/error.h"
#include "neap/files/file_system.h"

namespace neap::checkpoint {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string path = (std::filesystem::temp_directory_path() / "neap-checkpoint-XXXXXX").string();
    NEAP_CHECK(::mkdtemp(path.data()) != nullptr, "no temporary directory");
    path_ = path;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Fails at one call, counted from 0: that call alone, as a full disk may, or it and all after it, as if the process had
// been killed there.
class FailingFileSystem : public files::FileSystem {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  explicit FailingFileSystem(int fail_at = kNever, bool killed = false) : fail_at_(fail_at), killed_(killed) {}
  int calls() const { return calls_; }
  bool failed() const { return calls_ > fail_at_; }

 protected:
  void before(std::string_view action, const std::filesystem::path& path) override {
    const int call = calls_++;
    if (call == fail_at_ || (killed_ && call > fail_at_)) NEAP_USER_ERROR("injected: ", action, " ", path.string());
  }

 private:
  const int fail_at_;
  const bool killed_;
  std::atomic<int> calls_{0};
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}
inline void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Names (relative) and contents of all files below.
inline std::map<std::string, std::string> tree(const std::filesystem::path& dir) {
  std::map<std::string, std::string> out;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) out[entry.path().lexically_relative(dir).string()] = read_file(entry.path());
  }
  return out;
}

}  // namespace neap::checkpoint
