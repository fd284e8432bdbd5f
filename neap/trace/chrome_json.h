// torch-free
// Writes a Recorder's events in the JSON trace format that chrome://tracing and Perfetto (ui.perfetto.dev) open.
#pragma once

#include <ostream>
#include <string_view>

#include "neap/trace/recorder.h"

namespace neap::trace {

// Groups become processes, lanes threads, both named and in order of first use. Times keep their nanoseconds. A record
// that was cut short says so in an instant "dropped events". Always well-formed JSON, whatever the names hold.
void write_chrome_json(const Snapshot& snapshot, std::ostream& out);
void write_chrome_json(const Recorder& recorder, std::ostream& out);

// `text` as a JSON string with its quotes; bytes that are not UTF-8 become U+FFFD.
void write_json_string(std::string_view text, std::ostream& out);

}  // namespace neap::trace
