#include "neap/train/yaml_config.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "neap/base/error.h"
#include "neap/train/foreign_blocks.h"
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

// Looks a text over before nodes are made of it: counts its documents, and sees to it that its aliases come to an end.
// Whoever reads nodes follows every alias. One within what it stands for would lead on for ever, and a few lines of
// aliases of aliases stand for more values than any memory holds.
class Survey : public YAML::EventHandler {
 public:
  explicit Survey(std::string name) : name_(std::move(name)) {}
  int documents() const { return documents_; }

  void OnDocumentStart(const YAML::Mark& /*mark*/) override { ++documents_; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add(mark, anchor, 1); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = nodes_.find(anchor);
    NEAP_CHECK(found != nodes_.end(), "[", name_, ":", mark.line + 1,
               "] expected an alias of what is complete before it; found one within what it stands for");
    add(mark, 0, found->second);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t anchor,
                const std::string& /*value*/) override {
    add(mark, anchor, 1);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value /*style*/) override {
    open_.push_back({mark, anchor, 1});
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value /*style*/) override {
    open_.push_back({mark, anchor, 1});
  }
  void OnMapEnd() override { close(); }

 private:
  struct Open {
    YAML::Mark mark;
    YAML::anchor_t anchor;
    int64_t nodes;
  };
  static constexpr int64_t kMostNodes = 1'000'000;

  void close() {
    const Open done = open_.back();
    open_.pop_back();
    add(done.mark, done.anchor, done.nodes);
  }

  // A whole node, with all that its aliases stand for.
  void add(const YAML::Mark& mark, YAML::anchor_t anchor, int64_t nodes) {
    NEAP_CHECK(nodes <= kMostNodes, "[", name_, ":", mark.line + 1, "] expected at most ", kMostNodes,
               " values; found more, counting each alias as what it stands for");
    if (anchor != 0) nodes_[anchor] = nodes;
    if (!open_.empty()) open_.back().nodes += nodes;
  }

  const std::string name_;
  int documents_ = 0;
  std::vector<Open> open_;                   // outermost first
  std::map<YAML::anchor_t, int64_t> nodes_;  // of the nodes that have an anchor
};

YAML::Node parse_yaml(const std::string& text, const std::string& name) {
  check_characters(text, name);
  try {
    // YAML::LoadAll() never comes to an end where a document begins with `}` or the like: the parser reports document
    // after document without reading on. Two are enough to know.
    std::istringstream in(text);
    YAML::Parser parser(in);
    Survey survey(name);
    while (survey.documents() < 2 && parser.HandleNextDocument(survey)) {
    }
    NEAP_CHECK(survey.documents() < 2, "[", name, "] expected one YAML document; found several, or text after its end");
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

BlockNode block_node(const YAML::Node& value, const std::string& place, const std::string& file) {
  BlockNode out{.place = place};
  if (value.IsScalar()) {
    out.kind = BlockNode::Kind::kScalar;
    out.text = value.Scalar();
  } else if (value.IsSequence()) {
    out.kind = BlockNode::Kind::kList;
    for (const YAML::Node& item : value) out.items.push_back(block_node(item, place_of(item, file), file));
  } else if (value.IsMap()) {
    out.kind = BlockNode::Kind::kMap;
    for (const auto& entry : value) {
      const std::string where = place_of(entry.first, file);
      NEAP_CHECK(entry.first.IsScalar(), "[", where, "] expected the name of a key; found a list or section");
      out.names.push_back(entry.first.Scalar());
      out.items.push_back(block_node(entry.second, where, file));
    }
  }
  return out;
}

// One run file, key by key into a RunConfig.
class Application {
 public:
  Application(RunConfig& config, std::string file) : config_(config), file_(std::move(file)) {}

  void read(const YAML::Node& node, const std::string& prefix) {
    NEAP_CHECK(node.IsMap(), "[", place_of(node, file_), "] ", prefix.empty() ? "the run file" : prefix,
               ": expected a section of keys; found ", node.IsSequence() ? "a list" : "a plain value");
    for (const auto& entry : node) {
      const std::string place = place_of(entry.first, file_);
      NEAP_CHECK(entry.first.IsScalar(), "[", place, "] expected the name of a key; found a list or section");
      const std::string path = prefix.empty() ? entry.first.Scalar() : prefix + "." + entry.first.Scalar();
      NEAP_CHECK(given_.try_emplace(path, place).second, "[", place, "] ", path, " is given twice; keep one");
      read_entry(path, entry.second, place);
    }
  }

  // What blocks of other systems stand for: no key of theirs may have a second source.
  void read_foreign() {
    const Translation translation = translate(foreign_);
    std::map<std::string, const Translation::Claim*> claimed;
    for (const Translation::Claim& claim : translation.claims) {
      const auto own = given_.find(claim.path);
      NEAP_CHECK(own == given_.end(), "[", own->second, "] ", claim.path, " is what ", claim.block, " (", claim.place,
                 ") stands for, too; keep one of the two");
      const auto [other, is_new] = claimed.try_emplace(claim.path, &claim);
      NEAP_CHECK(is_new || other->second->block == claim.block, "[", claim.place, "] ", claim.block, " and ",
                 other->second->block, " (", other->second->place, ") both stand for ", claim.path,
                 "; keep one of the two");
    }
    for (const Translation::Value& value : translation.values) {
      const Key* key = find_key(value.path);
      NEAP_ASSERT(key != nullptr, value.path);
      key->set(config_, value.raw);
    }
    config_.demands = translation.demands;
  }

  // The paths that the file has, with their places.
  const std::map<std::string, std::string>& given() const { return given_; }

 private:
  void read_entry(const std::string& path, const YAML::Node& value, const std::string& place) {
    BlockNode node = block_node(value, place, file_);
    if (is_foreign_block(path, node)) {
      foreign_.push_back({path, std::move(node)});
    } else if (const Key* key = find_key(path)) {
      key->set(config_, raw_value(value, path, place));
    } else if (is_section(path)) {
      if (!value.IsNull()) read(value, path);
    } else {
      throw_unknown_key(path, place);
    }
  }

  RunConfig& config_;
  const std::string file_;
  std::map<std::string, std::string> given_;  // path, place
  std::vector<ForeignBlock> foreign_;
};

// A value of the command line is a list when it is written as one; everything else is one scalar, taken as it is, so
// that `model.layers.{*}` needs no YAML quoting.
RawValue raw_override(const std::string& path, const std::string& value) {
  const std::string place = "--" + path;
  if (value.starts_with('[')) return raw_value(parse_yaml(value, place), path, place);
  return RawValue{.items = {value}, .is_list = false, .place = place};
}

// Where a value was given: the command line wins over the file, and the file over nothing.
int source_of(const std::string& path, const std::map<std::string, std::string>& given,
              const std::vector<Override>& overrides) {
  const bool overridden = std::ranges::any_of(overrides, [&](const Override& o) { return o.first == path; });
  return overridden ? 2 : given.contains(path) ? 1 : 0;
}

// Two keys that say the same in different units: `second`, when it has a value, takes the place of `first`.
void keep_one(const char* first, const char* second, std::optional<int64_t>& second_value,
              const std::map<std::string, std::string>& given, const std::vector<Override>& overrides) {
  const int one = source_of(first, given, overrides);
  const int other = second_value ? source_of(second, given, overrides) : 0;
  NEAP_CHECK(other == 0 || one != other, "[", second, "] expected ", first, " or ", second,
             "; found both; keep one of the two");
  if (one > other) second_value.reset();
}

}  // namespace

RunConfig parse_config(const std::string& yaml, const std::string& name, const std::vector<Override>& overrides) {
  RunConfig config;
  const YAML::Node root = parse_yaml(yaml, name);
  std::map<std::string, std::string> given;
  if (!root.IsNull()) {
    Application application(config, name);
    application.read(root, "");
    application.read_foreign();
    given = application.given();
  }
  for (const auto& [path, value] : overrides) {
    const Key* key = find_key(path);
    NEAP_CHECK(
        key != nullptr || !is_foreign_name(path), "[--", path,
        "] blocks of other systems are read from the run file alone; found one on the command line; give the key "
        "of ours that it stands for (docs/config.md lists them)");
    if (key == nullptr) throw_unknown_key(path, "--" + path);
    key->set(config, raw_override(path, value));
    std::erase_if(config.demands, [&key = path](const LayerDemand& demand) { return demand.key == key; });
  }
  keep_one("train.steps", "train.tokens", config.train.tokens, given, overrides);
  keep_one("train.accumulation", "train.global_batch", config.train.global_batch, given, overrides);
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
