// torch-free
// Which modules of a model become units of a feature: names and patterns in, indices out.
//
// A pattern is one of
//   model.layers.{*}       the text before `{*}` is a path that must exist; every child of it matches, and what follows
//   model.layers.{*}.mlp   belongs to the pattern
//   model.layers.*.mlp     a glob, segment by segment: as many dots as the name, `*`, `?` and `[a-c]` within a segment;
//                          `model.layers.*` never reaches into a layer
//   model.layers.3         a name
//   0-19   5   7-4         indices into the model's own list of layers, either way round
// The model's own list of layers is what the model says it is; one that does not say has the longest family of units
// `prefix.0, prefix.1, …` nearest to the root.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace neap::autograd {

struct ModelNames {
  std::vector<std::string> modules;   // every module, in the model's order; the root's own name is ""
  std::vector<std::string> units;     // of these, the ones that can be units
  std::vector<std::string> layers{};  // of these, the ones that the model calls its layers; empty: it does not say
};

// Indices into `names.units`, ascending, each once. No patterns means the model's own list of layers. A pattern that
// matches nothing, an index out of range, and a model without layers where one is needed are UserErrors that name the
// pattern and the nearest existing name, and begin with `[section.modules]` or `[section.layers]`.
std::vector<std::size_t> select_units(const ModelNames& names, const std::vector<std::string>& patterns,
                                      std::string_view section);

// What the order of the names says runs after the last of the chosen units, as a final norm and a head do: of the units
// that follow it and are inside of no chosen one, the outermost. Indices into `units`, ascending.
std::vector<std::size_t> units_after(const std::vector<std::string>& units, const std::vector<std::size_t>& chosen);

// The model's own list of layers, as indices into `units` in the order of their numbers; empty when there is none.
std::vector<std::size_t> layer_list(const std::vector<std::string>& units);

// One segment of a name against one of a glob.
bool glob_matches(std::string_view pattern, std::string_view text);

// The name with the smallest edit distance; empty when there are none.
std::string nearest_name(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace neap::autograd
