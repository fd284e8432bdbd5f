// torch-free
#include "neap/train/block_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "neap/autograd/unit_selection.h"
#include "neap/base/error.h"

namespace neap::train::internal {
namespace {

using neap::internal::concat;
using Kind = BlockNode::Kind;

std::string found_text(const BlockNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      return "nothing";
    case Kind::kScalar:
      return "\"" + node.text + "\"";
    case Kind::kList:
      return "a list";
    case Kind::kMap:
      break;
  }
  return "a section of keys";
}

template <class T>
std::optional<T> parse(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> names_under(const std::string& schema, const std::vector<BlockKey>& known) {
  std::vector<std::string> names;
  for (const BlockKey& key : known) {
    if (!key.path.starts_with(schema + ".")) continue;
    std::string name = key.path.substr(schema.size() + 1);
    if (name.find('.') == std::string::npos) names.push_back(std::move(name));
  }
  return names;
}

LayerSpec read_layer(const std::string& path, const BlockNode& node) {
  constexpr const char* kExpected = "an index or a range of layers such as 5 or '0-3'";
  if (node.kind != Kind::kScalar) throw_bad_block_value(path, node, kExpected);
  const std::string_view text = node.text;
  const size_t dash = text.find('-');
  const auto first = parse<int64_t>(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : parse<int64_t>(text.substr(dash + 1));
  constexpr int64_t kMost = 1'000'000;
  if (!first || !last || *first < 0 || *last < 0 || *first > kMost || *last > kMost) {
    throw_bad_block_value(path, node, kExpected);
  }
  return {.written = node.text, .first = std::min(*first, *last), .last = std::max(*first, *last)};
}

}  // namespace

void throw_bad_block_value(const std::string& path, const BlockNode& node, const std::string& expected) {
  NEAP_USER_ERROR("[", node.place, "] ", path, ": expected ", expected, "; found ", found_text(node));
}

std::vector<LayerSpec> read_layers(const std::string& path, const BlockNode& node) {
  if (node.kind == Kind::kScalar) return {read_layer(path, node)};
  if (node.kind != Kind::kList || node.items.empty()) {
    throw_bad_block_value(path, node, "a list of layers such as ['0-3', '5']");
  }
  std::vector<LayerSpec> specs;
  for (const BlockNode& item : node.items) specs.push_back(read_layer(path, item));
  return specs;
}

std::vector<int64_t> layers_of(const std::vector<LayerSpec>& specs) {
  std::set<int64_t> layers;
  for (const LayerSpec& spec : specs) {
    for (int64_t layer = spec.first; layer <= spec.last; ++layer) layers.insert(layer);
  }
  return {layers.begin(), layers.end()};
}

BlockReader::BlockReader(std::string path, const BlockNode& node, const std::string& schema,
                         const std::vector<BlockKey>& known)
    : path_(std::move(path)), node_(node) {
  if (node.kind != Kind::kMap) throw_bad_block_value(path_, node, "a section of keys");
  const std::vector<std::string> names = names_under(schema, known);
  std::set<std::string> seen;
  for (size_t i = 0; i < node.names.size(); ++i) {
    const std::string& name = node.names[i];
    NEAP_CHECK(std::ranges::find(names, name) != names.end(), "[", node.items[i].place, "] unknown key ", path_of(name),
               "; nearest known key: ", path_of(autograd::nearest_name(name, names)));
    NEAP_CHECK(seen.insert(name).second, "[", node.items[i].place, "] ", path_of(name), " is given twice; keep one");
  }
}

const BlockNode* BlockReader::find(std::string_view name) const {
  for (size_t i = 0; i < node_.names.size(); ++i) {
    if (node_.names[i] == name) return node_.items[i].kind == Kind::kNull ? nullptr : &node_.items[i];
  }
  return nullptr;
}

std::string BlockReader::origin(std::string_view name) const {
  const BlockNode* node = find(name);
  return concat(node == nullptr ? node_.place : node->place, ", ", path_of(name));
}

bool BlockReader::boolean(std::string_view name, bool otherwise) const {
  const BlockNode* node = find(name);
  if (node == nullptr) return otherwise;
  for (const char* word : {"true", "True", "TRUE"}) {
    if (node->kind == Kind::kScalar && node->text == word) return true;
  }
  for (const char* word : {"false", "False", "FALSE"}) {
    if (node->kind == Kind::kScalar && node->text == word) return false;
  }
  throw_bad_block_value(path_of(name), *node, "true or false");
}

int64_t BlockReader::integer(std::string_view name, int64_t otherwise, int64_t low, int64_t high) const {
  const BlockNode* node = find(name);
  if (node == nullptr) return otherwise;
  const auto value = node->kind == Kind::kScalar ? parse<int64_t>(node->text) : std::nullopt;
  if (!value || *value < low || *value > high) {
    throw_bad_block_value(path_of(name), *node,
                          low == high ? concat(low) : concat("an integer from ", low, " to ", high));
  }
  return *value;
}

double BlockReader::amount(std::string_view name, double otherwise) const {
  const BlockNode* node = find(name);
  if (node == nullptr) return otherwise;
  const auto value = node->kind == Kind::kScalar ? parse<double>(node->text) : std::nullopt;
  if (!value || !std::isfinite(*value) || *value < 0) {
    throw_bad_block_value(path_of(name), *node, "a number of at least 0");
  }
  return *value;
}

std::string BlockReader::word(std::string_view name, const std::vector<std::string>& words) const {
  const BlockNode* node = find(name);
  if (node == nullptr) return words.front();
  if (node->kind == Kind::kScalar && std::ranges::find(words, node->text) != words.end()) return node->text;
  std::string expected;
  for (size_t i = 0; i < words.size(); ++i) {
    expected += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  }
  throw_bad_block_value(path_of(name), *node, expected);
}

std::vector<std::string> BlockReader::texts(std::string_view name) const {
  const BlockNode* node = find(name);
  if (node == nullptr) return {};
  if (node->kind == Kind::kScalar) return {node->text};
  std::vector<std::string> texts;
  if (node->kind == Kind::kMap) throw_bad_block_value(path_of(name), *node, "a list of texts");
  for (const BlockNode& item : node->items) {
    if (item.kind != Kind::kScalar || item.text.empty()) throw_bad_block_value(path_of(name), item, "a text");
    texts.push_back(item.text);
  }
  return texts;
}

RawValue one(std::string text, std::string place) {
  return {.items = {std::move(text)}, .is_list = false, .place = std::move(place)};
}

RawValue many(std::vector<std::string> texts, std::string place) {
  return {.items = std::move(texts), .is_list = true, .place = std::move(place)};
}

}  // namespace neap::train::internal
