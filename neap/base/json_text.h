// torch-free
// JSON from outside, read so that no text of it can end the process.
//
// What walks over a value of nlohmann's, such as dump() or a comparison, calls itself for every level: a file of
// brackets alone would take it past the end of its stack. No file that is read here needs more than a few.
#pragma once

#include <string_view>

namespace neap {

inline constexpr int kJsonLevels = 64;

// Whether arrays and objects lie in more than `levels` others, by the brackets outside of strings. Of what is no JSON
// it says something, too.
bool nests_deeper(std::string_view json, int levels);

// is_discarded() for what is no JSON or nests deeper than kJsonLevels. `Json` is one of nlohmann's.
template <class Json>
Json parse_json(std::string_view text) {
  if (nests_deeper(text, kJsonLevels)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace neap
