// torch-free
// A value that is JSON, and nothing that should be walked over: lists in lists.
#pragma once

#include <cstddef>
#include <string>

namespace neap::testing {

inline std::string nested_json(std::size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

}  // namespace neap::testing
