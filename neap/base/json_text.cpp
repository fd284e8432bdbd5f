// torch-free
#include "neap/base/json_text.h"

#include <cstddef>

namespace neap {

bool nests_deeper(std::string_view json, int levels) {
  int open = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string && c == '\\') {
      ++i;  // whatever is escaped ends no string
    } else if (c == '"') {
      in_string = !in_string;
    } else if (!in_string && (c == '[' || c == '{')) {
      if (++open > levels) return true;
    } else if (!in_string && (c == ']' || c == '}')) {
      --open;
    }
  }
  return false;
}

}  // namespace neap
