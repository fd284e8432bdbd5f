// torch-free
#include "neap/sim/loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <system_error>
#include <vector>

#include "neap/base/error.h"
#include "neap/sim/settings.h"

namespace neap::sim {
namespace {

constexpr const char* kFileName = "libneap_sim.so";

// The folders of the shared library that this code was linked into, if it was, and of the program.
std::vector<std::filesystem::path> own_folders() {
  std::vector<std::filesystem::path> folders;
  std::error_code ignored;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&load), &info) != 0 && info.dli_fname != nullptr)
    if (const auto file = std::filesystem::canonical(info.dli_fname, ignored); !file.empty())
      folders.push_back(file.parent_path());
  // The name above is what a program was started as, which says nothing when it was found through PATH.
  if (const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored); !program.empty())
    folders.push_back(program.parent_path());
  return folders;
}

std::filesystem::path find_library() {
  if (const char* named = std::getenv(kLibraryVariable); named != nullptr && *named != '\0') return named;
  std::vector<std::filesystem::path> places;
  for (const auto& folder : own_folders()) {
    places.push_back(folder / kFileName);
    places.push_back(folder / "lib" / kFileName);  // the Python package holds an installation
    places.push_back(folder.parent_path() / "lib" / kFileName);
  }
#ifdef NEAP_SIM_BUILT_LIBRARY
  places.emplace_back(NEAP_SIM_BUILT_LIBRARY);
#endif
  std::string looked_at;
  for (const auto& place : places) {
    std::error_code ignored;
    if (std::filesystem::exists(place, ignored)) return place;
    looked_at.append(looked_at.empty() ? "" : ", ").append(place.string());
  }
  NEAP_USER_ERROR("[sim] expected the simulated accelerator, ", kFileName, "; found nothing at ", looked_at, "; set ",
                  kLibraryVariable, " to the file");
}

}  // namespace

Control& load_library(const std::filesystem::path& file) {
  // Never unloaded: torch keeps pointers into it.
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  NEAP_CHECK(library != nullptr, "[sim] expected the simulated accelerator in ", file.string(), "; ", dlerror());
  auto* entry = reinterpret_cast<ControlEntry*>(dlsym(library, kControlSymbol));
  NEAP_CHECK(entry != nullptr, "[sim] expected ", kControlSymbol, " in ", file.string(),
             "; found a library of another version; use the one that was built with this program");
  return entry();
}

Control& load() {
  // A call that throws leaves nothing behind: the next one tries again.
  static Control& control = []() -> Control& {
    Control& loaded = load_library(find_library());
    loaded.configure(settings_from_environment(loaded.config()));
    return loaded;
  }();
  return control;
}

}  // namespace neap::sim
