// torch-free
#include "neap/autograd/unit_selection.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "neap/base/error.h"

namespace neap::autograd {
namespace {

constexpr std::string_view kChildren = "{*}";

std::vector<std::string_view> split(std::string_view name) {
  std::vector<std::string_view> segments;
  for (size_t begin = 0;;) {
    const size_t dot = name.find('.', begin);
    segments.push_back(name.substr(begin, dot - begin));
    if (dot == std::string_view::npos) return segments;
    begin = dot + 1;
  }
}

std::optional<int64_t> parse_index(std::string_view text) {
  int64_t value = 0;
  const auto [rest, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || status != std::errc() || rest != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

bool is_index_pattern(std::string_view pattern) {
  return pattern.find_first_not_of("0123456789- ") == std::string_view::npos &&
         pattern.find_first_of("0123456789") != std::string_view::npos;
}

struct Range {
  int64_t first, last;
};

Range parse_range(std::string_view pattern, std::string_view section) {
  const auto bad = [&]() -> Range {
    NEAP_USER_ERROR("[", section, ".layers] expected an index or a range such as 5 or 0-19; found '", pattern, "'");
  };
  const size_t dash = pattern.find('-');
  const auto first = parse_index(pattern.substr(0, dash));
  if (!first) return bad();
  if (dash == std::string_view::npos) return {*first, *first};
  const auto last = parse_index(pattern.substr(dash + 1));
  return last ? Range{std::min(*first, *last), std::max(*first, *last)} : bad();
}

// The place right after a bracket expression that begins at pattern[at], and whether it holds `c`.
std::optional<std::pair<size_t, bool>> match_bracket(std::string_view pattern, size_t at, char c) {
  size_t i = at + 1;
  const bool negated = i < pattern.size() && (pattern[i] == '!' || pattern[i] == '^');
  if (negated) ++i;
  const size_t close = pattern.find(']', i + 1);
  if (close == std::string_view::npos) return std::nullopt;  // a lone bracket is a plain character
  bool held = false;
  for (; i < close; ++i) {
    if (i + 2 < close && pattern[i + 1] == '-') {
      held |= pattern[i] <= c && c <= pattern[i + 2];
      i += 2;
    } else {
      held |= pattern[i] == c;
    }
  }
  return std::pair{close + 1, held != negated};
}

bool segments_match(const std::vector<std::string_view>& pattern, const std::vector<std::string_view>& name) {
  return pattern.size() == name.size() &&
         std::equal(pattern.begin(), pattern.end(), name.begin(), [](std::string_view glob, std::string_view text) {
           return glob == kChildren || glob_matches(glob, text);
         });
}

std::string nearest_hint(std::string_view wanted, const std::vector<std::string>& names) {
  const std::string nearest = nearest_name(wanted, names);
  return nearest.empty() ? "; this model has none" : internal::concat("; the nearest is '", nearest, "'");
}

// `{*}` walks: what is before it must be there, and it must be a segment of its own.
void check_walk(std::string_view pattern, const std::vector<std::string_view>& segments, const ModelNames& names,
                std::string_view section) {
  std::string prefix;
  for (const std::string_view segment : segments) {
    if (segment == kChildren) {
      NEAP_CHECK(prefix.empty() || std::ranges::find(names.modules, prefix) != names.modules.end(), "[", section,
                 ".modules] pattern '", pattern, "': expected a module named '", prefix, "'; found none",
                 nearest_hint(prefix, names.modules));
      return;
    }
    NEAP_CHECK(segment.find(kChildren) == std::string_view::npos, "[", section, ".modules] pattern '", pattern,
               "': expected {*} alone between dots; found '", segment, "'");
    prefix += prefix.empty() ? segment : internal::concat('.', segment);
  }
}

class Selector {
 public:
  Selector(const ModelNames& names, std::string_view section) : names_(names), section_(section) {
    for (const std::string& unit : names.units) split_units_.push_back(split(unit));
  }

  void add(std::string_view pattern) {
    if (is_index_pattern(pattern)) {
      add_layers(pattern);
    } else {
      add_named(pattern);
    }
  }

  void add_all_layers() {
    const auto layers = names_.layers.empty() ? layers_or_throw() : indices_of(names_.layers);
    chosen_.insert(layers.begin(), layers.end());
  }

  std::vector<size_t> chosen() const { return {chosen_.begin(), chosen_.end()}; }

 private:
  std::vector<size_t> indices_of(const std::vector<std::string>& units) const {
    std::vector<size_t> indices;
    indices.reserve(units.size());
    for (const std::string& unit : units) {
      indices.push_back(static_cast<size_t>(std::ranges::find(names_.units, unit) - names_.units.begin()));
    }
    return indices;
  }

  // By their numbers.
  std::vector<size_t> layers_or_throw() const {
    auto layers = layer_list(names_.units);
    if (!names_.layers.empty()) {
      std::vector<std::string> numbered;
      for (const size_t i : layer_list(names_.layers)) numbered.push_back(names_.layers[i]);
      layers = indices_of(numbered);
    }
    NEAP_CHECK(!layers.empty(), "[", section_,
               ".modules] expected a model with a list of layers that can be units; found none; name the modules");
    return layers;
  }

  void add_layers(std::string_view pattern) {
    const auto layers = layers_or_throw();
    const Range range = parse_range(pattern, section_);
    const auto count = static_cast<int64_t>(layers.size());
    NEAP_CHECK(range.last < count, "[", section_, ".layers] expected indices from 0 to ", count - 1, "; found '",
               pattern, "'");
    for (int64_t i = range.first; i <= range.last; ++i) chosen_.insert(layers[static_cast<size_t>(i)]);
  }

  void add_named(std::string_view pattern) {
    NEAP_CHECK(!pattern.empty(), "[", section_,
               ".modules] expected the name of a module or a pattern; found an empty text");
    const auto segments = split(pattern);
    check_walk(pattern, segments, names_, section_);
    bool matched = false;
    for (size_t i = 0; i < split_units_.size(); ++i) {
      if (!segments_match(segments, split_units_[i])) continue;
      matched = true;
      chosen_.insert(i);
    }
    if (!matched) throw_unmatched(pattern, segments);
  }

  [[noreturn]] void throw_unmatched(std::string_view pattern, const std::vector<std::string_view>& segments) const {
    for (const std::string& module : names_.modules) {
      NEAP_CHECK(!segments_match(segments, split(module)), "[", section_, ".modules] pattern '", pattern, "' matches '",
                 module, "', which has no hook point and cannot be a unit", nearest_hint(pattern, names_.units));
    }
    NEAP_USER_ERROR("[", section_, ".modules] pattern '", pattern, "' matches no module",
                    nearest_hint(pattern, names_.units));
  }

  const ModelNames& names_;
  const std::string_view section_;
  std::vector<std::vector<std::string_view>> split_units_;
  std::set<size_t> chosen_;
};

}  // namespace

bool glob_matches(std::string_view pattern, std::string_view text) {
  // Backtracks to the latest star only, which is enough: an earlier one can always take less.
  size_t p = 0, t = 0, star = std::string_view::npos, star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
      continue;
    }
    bool same = p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t]);
    size_t next = p + 1;
    if (p < pattern.size() && pattern[p] == '[') {
      if (const auto bracket = match_bracket(pattern, p, text[t])) std::tie(next, same) = *bracket;
    }
    if (same) {
      p = next;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

std::string nearest_name(std::string_view wanted, const std::vector<std::string>& names) {
  const auto distance = [wanted](std::string_view name) {
    std::vector<size_t> row(name.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < wanted.size(); ++i) {
      size_t diagonal = std::exchange(row[0], i + 1);
      for (size_t j = 0; j < name.size(); ++j) {
        const size_t replaced = diagonal + (wanted[i] == name[j] ? 0 : 1);
        diagonal = row[j + 1];
        row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
      }
    }
    return row.back();
  };
  std::string nearest;
  size_t best = SIZE_MAX;
  for (const std::string& name : names) {
    if (name.empty()) continue;  // the root has no name to suggest
    if (const size_t d = distance(name); d < best) {
      best = d;
      nearest = name;
    }
  }
  return nearest;
}

std::vector<size_t> layer_list(const std::vector<std::string>& units) {
  struct Family {
    size_t depth = 0;
    std::vector<std::pair<int64_t, size_t>> members;  // number, index
  };
  std::map<std::string_view, Family> families;
  for (size_t i = 0; i < units.size(); ++i) {
    const std::string_view name = units[i];
    const size_t dot = name.rfind('.');
    const auto number = parse_index(name.substr(dot == std::string_view::npos ? 0 : dot + 1));
    if (!number) continue;
    const auto prefix = name.substr(0, dot == std::string_view::npos ? 0 : dot);
    Family& family = families[prefix];
    family.depth = static_cast<size_t>(std::ranges::count(name, '.'));
    family.members.emplace_back(*number, i);
  }
  const Family* best = nullptr;
  for (const auto& [prefix, family] : families) {
    if (best == nullptr || family.depth < best->depth ||
        (family.depth == best->depth && family.members.size() > best->members.size()))
      best = &family;
  }
  std::vector<size_t> layers;
  if (best == nullptr) return layers;
  auto members = best->members;
  std::ranges::sort(members);
  for (const auto& [number, index] : members) layers.push_back(index);
  return layers;
}

std::vector<size_t> units_after(const std::vector<std::string>& units, const std::vector<size_t>& chosen) {
  std::vector<size_t> after;
  if (chosen.empty()) return after;
  std::set<std::string_view> taken;
  for (const size_t i : chosen) taken.insert(units[i]);
  const auto inside_taken = [&](std::string_view name) {
    while (!taken.contains(name)) {
      if (name.empty()) return false;
      const size_t dot = name.rfind('.');
      name = name.substr(0, dot == std::string_view::npos ? 0 : dot);
    }
    return true;
  };
  for (size_t i = *std::ranges::max_element(chosen) + 1; i < units.size(); ++i) {
    if (inside_taken(units[i])) continue;
    taken.insert(units[i]);
    after.push_back(i);
  }
  return after;
}

std::vector<size_t> select_units(const ModelNames& names, const std::vector<std::string>& patterns,
                                 std::string_view section) {
  Selector selector(names, section);
  if (patterns.empty()) selector.add_all_layers();
  for (const std::string& pattern : patterns) selector.add(pattern);
  return selector.chosen();
}

}  // namespace neap::autograd
