#include "neap/train/yaml_config.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "neap/base/error.h"
#include "neap/train/schema.h"

namespace neap::train {
namespace {

std::string place_of(const YAML::Node& node, const std::string& file) {
  const YAML::Mark mark = node.Mark();
  return mark.is_null() ? file : file + ":" + std::to_string(mark.line + 1);
}

// YAML has no place for control characters; yaml-cpp takes 0x04 for the end of its input, and its scanner may then run
// on for ever.
void check_characters(const std::string& text, const std::string& name) {
  const auto bad = std::ranges::find_if(text, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return (byte < 0x20 && c != '\n' && c != '\r' && c != '\t') || byte == 0x7f;
  });
  if (bad == text.end()) return;
  NEAP_USER_ERROR("[", name, ":", 1 + std::count(text.begin(), bad, '\n'),
                  "] not valid YAML: expected text; found the control character ",
                  static_cast<int>(static_cast<unsigned char>(*bad)));
}

// Counts documents, and looks at nothing else of them.
class DocumentCounter : public YAML::EventHandler {
 public:
  int count = 0;

  void OnDocumentStart(const YAML::Mark& /*mark*/) override { ++count; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnAlias(const YAML::Mark& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnScalar(const YAML::Mark& /*mark*/, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                const std::string& /*value*/) override {}
  void OnSequenceStart(const YAML::Mark& /*mark*/, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                       YAML::EmitterStyle::value /*style*/) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& /*mark*/, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                  YAML::EmitterStyle::value /*style*/) override {}
  void OnMapEnd() override {}
};

YAML::Node parse_yaml(const std::string& text, const std::string& name) {
  check_characters(text, name);
  try {
    // YAML::LoadAll() never comes to an end where a document begins with `}` or the like: the parser reports document
    // after document without reading on. Two are enough to know.
    std::istringstream in(text);
    YAML::Parser parser(in);
    DocumentCounter documents;
    while (documents.count < 2 && parser.HandleNextDocument(documents)) {
    }
    NEAP_CHECK(documents.count < 2, "[", name, "] expected one YAML document; found several, or text after its end");
    return YAML::Load(text);
  } catch (const YAML::Exception& error) {
    const std::string line = error.mark.is_null() ? "" : ":" + std::to_string(error.mark.line + 1);
    NEAP_USER_ERROR("[", name, line, "] not valid YAML: ", error.msg);
  }
}

RawValue raw_value(const YAML::Node& node, const std::string& path, const std::string& place) {
  RawValue raw{.items = {}, .is_list = node.IsSequence(), .place = place};
  if (node.IsSequence()) {
    for (const YAML::Node& item : node) {
      NEAP_CHECK(item.IsScalar(), "[", place, "] ", path, ": expected a list of plain values; found a nested one");
      raw.items.push_back(item.Scalar());
    }
  } else {
    NEAP_CHECK(node.IsScalar(), "[", place, "] ", path, ": expected a value; found ",
               node.IsMap() ? "a section of keys" : "nothing");
    raw.items.push_back(node.Scalar());
  }
  return raw;
}

void apply(const YAML::Node& node, const std::string& prefix, const std::string& file, RunConfig& config) {
  NEAP_CHECK(node.IsMap(), "[", place_of(node, file), "] ", prefix.empty() ? "the run file" : prefix,
             ": expected a section of keys; found ", node.IsSequence() ? "a list" : "a plain value");
  std::set<std::string> seen;
  for (const auto& entry : node) {
    const std::string place = place_of(entry.first, file);
    NEAP_CHECK(entry.first.IsScalar(), "[", place, "] expected the name of a key; found a list or section");
    const std::string path = prefix.empty() ? entry.first.Scalar() : prefix + "." + entry.first.Scalar();
    NEAP_CHECK(seen.insert(path).second, "[", place, "] ", path, " is given twice; keep one");
    if (const Key* key = find_key(path)) {
      key->set(config, raw_value(entry.second, path, place));
    } else if (is_section(path)) {
      if (!entry.second.IsNull()) apply(entry.second, path, file, config);
    } else {
      throw_unknown_key(path, place);
    }
  }
}

// A value of the command line is a list when it is written as one; everything else is one scalar, taken as it is, so
// that `model.layers.{*}` needs no YAML quoting.
RawValue raw_override(const std::string& path, const std::string& value) {
  const std::string place = "--" + path;
  if (value.starts_with('[')) return raw_value(parse_yaml(value, place), path, place);
  return RawValue{.items = {value}, .is_list = false, .place = place};
}

}  // namespace

RunConfig parse_config(const std::string& yaml, const std::string& name, const std::vector<Override>& overrides) {
  RunConfig config;
  const YAML::Node root = parse_yaml(yaml, name);
  if (!root.IsNull()) apply(root, "", name, config);
  for (const auto& [path, value] : overrides) {
    const Key* key = find_key(path);
    if (key == nullptr) throw_unknown_key(path, "--" + path);
    key->set(config, raw_override(path, value));
  }
  check(config);
  return config;
}

RunConfig load_config(const std::filesystem::path& file, const std::vector<Override>& overrides) {
  std::error_code status;
  NEAP_CHECK(std::filesystem::is_regular_file(file, status), "[", file.string(), "] expected a run file; found ",
             std::filesystem::is_directory(file, status) ? "a directory" : "nothing there");
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  NEAP_CHECK(in.good(), "[", file.string(), "] the run file cannot be read; check its permissions");
  RunConfig config = parse_config(text.str(), file.string(), overrides);
  if (config.log.dir.empty()) config.log.dir = (std::filesystem::path("runs") / file.stem()).string();
  return config;
}

}  // namespace neap::train
