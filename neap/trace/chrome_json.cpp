#include "neap/trace/chrome_json.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>

namespace neap::trace {
namespace {

// Length of the UTF-8 sequence at the front of `text`; 0 when there is none.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
  if (length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  if (length < 3) return length;
  // Longer than needed, surrogates, beyond U+10FFFF: told apart by the second byte.
  const bool malformed = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
                         (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F);
  return malformed ? 0 : length;
}

void write_escaped(unsigned char c, std::ostream& out) {
  switch (c) {
    case '"':
      out << "\\\"";
      return;
    case '\\':
      out << "\\\\";
      return;
    case '\n':
      out << "\\n";
      return;
    case '\t':
      out << "\\t";
      return;
    default:
      break;
  }
  if (c >= 0x20) {
    out << static_cast<char>(c);
    return;
  }
  char buffer[8];
  std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
  out << buffer;
}

void write_number(double value, std::ostream& out) {
  if (!std::isfinite(value)) {  // JSON has no such numbers; as text they are at least readable
    out << (std::isnan(value) ? "\"nan\"" : value > 0 ? "\"inf\"" : "\"-inf\"");
    return;
  }
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;  // locale-free and exact, unlike a stream
  out << std::string_view(buffer, static_cast<size_t>(end - buffer));
}

// The format's unit is the microsecond; three decimals keep every nanosecond.
void write_micros(int64_t ns, std::ostream& out) {
  const uint64_t magnitude = ns < 0 ? 0 - static_cast<uint64_t>(ns) : static_cast<uint64_t>(ns);
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%s%llu.%03u", ns < 0 ? "-" : "",
                static_cast<unsigned long long>(magnitude / 1000), static_cast<unsigned>(magnitude % 1000));
  out << buffer;
}

struct Place {
  int process = 0;
  int thread = 0;
};

class Writer {
 public:
  Writer(const Snapshot& snapshot, std::ostream& out) : snapshot_(snapshot), out_(out) {}

  void write() {
    out_ << R"({"displayTimeUnit":"ms","traceEvents":[)";
    for (const Event& event : snapshot_.events) write_event(event);
    if (snapshot_.dropped > 0) write_dropped();
    out_ << "\n]}\n";
  }

 private:
  void write_event(const Event& event) {
    const Place place = place_of(event.track);
    begin(event.kind == Kind::kSpan ? "X" : event.kind == Kind::kInstant ? "i" : "C", place, event.name);
    out_ << ",\"ts\":";
    write_micros(event.begin_ns, out_);
    if (event.kind == Kind::kSpan) {
      out_ << ",\"dur\":";
      write_micros(event.end_ns - event.begin_ns, out_);
    }
    if (event.kind == Kind::kInstant) out_ << R"(,"s":"t")";
    write_args(event);
    out_ << '}';
  }

  void write_args(const Event& event) {
    if (event.kind == Kind::kCounter) {
      out_ << R"(,"args":{"value":)";
      write_number(event.value, out_);
      out_ << '}';
    } else if (event.arg_count > 0) {
      const char* separator = ",\"args\":{";
      for (size_t i = 0; i < event.arg_count; ++i) {
        const Arg& arg = snapshot_.args[event.first_arg + i];
        out_ << separator;
        write_json_string(arg.key, out_);
        out_ << ':';
        write_value(arg);
        separator = ",";
      }
      out_ << '}';
    }
  }

  void write_value(const Arg& arg) {
    if (const auto* number = std::get_if<int64_t>(&arg.value)) out_ << std::to_string(*number);
    if (const auto* number = std::get_if<double>(&arg.value)) write_number(*number, out_);
    if (const auto* text = std::get_if<std::string_view>(&arg.value)) write_json_string(*text, out_);
  }

  void write_dropped() {
    const int64_t at_ns = snapshot_.events.empty() ? 0 : snapshot_.events.back().end_ns;
    const Place place = place_of("trace/recorder");
    begin("i", place, "dropped events");
    out_ << R"(,"s":"g","ts":)";
    write_micros(at_ns, out_);
    out_ << ",\"args\":{\"count\":" << std::to_string(snapshot_.dropped) << "}}";
  }

  void begin(const char* phase, Place place, std::string_view name) {
    out_ << (first_ ? "\n" : ",\n") << "{\"ph\":\"" << phase << "\",\"pid\":" << std::to_string(place.process)
         << ",\"tid\":" << std::to_string(place.thread) << ",\"name\":";
    write_json_string(name, out_);
    first_ = false;
  }

  // The process and thread of a track, introduced by name when the track is first seen.
  Place place_of(std::string_view track) {
    const auto known = places_.find(track);
    if (known != places_.end()) return known->second;
    const size_t slash = track.find('/');
    const std::string_view group = track.substr(0, slash);
    const std::string_view lane = slash == std::string_view::npos ? track : track.substr(slash + 1);
    const auto [process, new_process] = processes_.try_emplace(group, static_cast<int>(processes_.size()) + 1);
    const Place place{process->second, static_cast<int>(places_.size()) + 1};
    places_.emplace(track, place);
    if (new_process) write_metadata("process", place, group, process->second);
    write_metadata("thread", place, lane, place.thread);
    return place;
  }

  void write_metadata(const std::string& what, Place place, std::string_view name, int order) {
    begin("M", place, what + "_name");
    out_ << ",\"args\":{\"name\":";
    write_json_string(name, out_);
    out_ << "}}";
    begin("M", place, what + "_sort_index");
    out_ << ",\"args\":{\"sort_index\":" << std::to_string(order) << "}}";
  }

  const Snapshot& snapshot_;
  std::ostream& out_;
  bool first_ = true;
  std::map<std::string_view, int> processes_;
  std::map<std::string_view, Place> places_;
};

}  // namespace

void write_json_string(std::string_view text, std::ostream& out) {
  out << '"';
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) {
      out << "\xEF\xBF\xBD";
    } else if (length == 1) {
      write_escaped(static_cast<unsigned char>(text[0]), out);
    } else {
      out << text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out << '"';
}

void write_chrome_json(const Snapshot& snapshot, std::ostream& out) { Writer(snapshot, out).write(); }

void write_chrome_json(const Recorder& recorder, std::ostream& out) { write_chrome_json(recorder.snapshot(), out); }

}  // namespace neap::trace
