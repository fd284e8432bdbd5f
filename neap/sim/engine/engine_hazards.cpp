// torch-free
// The hazard checker: what is used without being ordered after what came before. All of it runs at submission, so the
// answer depends on the program alone.
#include <algorithm>
#include <utility>

#include "neap/base/error.h"
#include "neap/sim/engine/engine.h"

namespace neap::sim {
namespace {

constexpr std::size_t kMaxReports = 100;

const char* verb(bool write) { return write ? "writes" : "reads"; }

}  // namespace

void Engine::check(Stream* stream, std::span<const Range> ranges, const char* what) {
  for (const Range& range : ranges) {
    if (range.block == nullptr || range.begin >= range.end) continue;
    Block& block = *range.block;
    const Access next{stream->index_, range.write, stream->number_, range.begin, range.end, what};
    if (!block.live_) {
      report(block, internal::concat(describe(next), " after it was freed; hold a reference until then"));
      continue;
    }
    for (const Access& earlier : block.accesses_.conflicts(next, stream->seen_))
      report(block, internal::concat(describe(next), " without being ordered after what ", describe(earlier),
                                     "; wait for an event recorded after the latter"));
    block.accesses_.add(next, stream->seen_);
  }
}

// What nobody is ordered after when the block is freed may still be put right before the memory is reused.
void Engine::check_free(Block* block) {
  const Stream* home = block->home_;
  const VectorClock& host_seen = host().seen;
  for (const Access& use : block->accesses_.accesses()) {
    if (use.stream == home->index_) continue;
    if (std::max(home->seen_.at(use.stream), host_seen.at(use.stream)) >= use.number) continue;
    const auto& recorded = block->recorded_;
    if (std::any_of(recorded.begin(), recorded.end(), [&](const Stream* s) { return s->index_ == use.stream; }))
      continue;
    if (config_.strict_free) {
      report(*block, internal::concat("is freed without its home stream being ordered after what ", describe(use),
                                      "; wait for that, or record the stream"));
    } else {
      block->home_->unordered_.push_back({block->id(), block->bytes(), use});
    }
  }
}

// The home stream allocates: from here on it may reuse any block that was freed before.
void Engine::check_reuse(Stream* home) {
  for (const auto& [id, bytes, use] : home->unordered_) {
    if (home->seen_.at(use.stream) >= use.number || hazards_.size() >= kMaxReports) continue;
    hazards_.push_back(internal::concat("[sim] block #", id, " (", bytes, " bytes, home ", home->name(),
                                        ") was freed and may be reused without being ordered after what ",
                                        describe(use), "; wait for that before freeing, or record the stream"));
  }
  home->unordered_.clear();
}

void Engine::host_read(const void* data, std::size_t bytes, const char* what) { check_host(data, bytes, false, what); }

void Engine::host_write(const void* data, std::size_t bytes, const char* what) { check_host(data, bytes, true, what); }

// Nothing to remember: every later submission is ordered after the host's own accesses.
void Engine::check_host(const void* data, std::size_t bytes, bool write, const char* what) {
  MutexLock lock(mutex_);
  if (!config_.hazard_check || bytes == 0) return;
  const Block* block = find_block(data);
  if (block == nullptr) return;
  const auto begin = static_cast<std::size_t>(static_cast<const char*>(data) - static_cast<const char*>(block->data()));
  const Access next{.stream = -1, .write = write, .number = 0, .begin = begin, .end = begin + bytes, .what = what};
  for (const Access& earlier : block->accesses_.conflicts(next, host().seen))
    report(*block, internal::concat("the host's ", what, " ", verb(write), " bytes ", next.begin, " to ", next.end,
                                    " without having waited for what ", describe(earlier),
                                    "; synchronize with an event recorded after the latter"));
}

std::vector<std::string> Engine::take_hazards() {
  MutexLock lock(mutex_);
  return std::exchange(hazards_, {});
}

void Engine::report(const Block& block, const std::string& text) {
  if (hazards_.size() >= kMaxReports) return;
  hazards_.push_back(internal::concat("[sim] block #", block.id(), " (", block.bytes(), " bytes, ",
                                      block.pinned() ? "page-locked" : internal::concat("home ", block.home_->name()),
                                      "): ", text));
}

// "'copy out' on sim:0 stream 1 reads, bytes 0 to 4000"
std::string Engine::describe(const Access& access) const {
  return internal::concat("'", access.what, "' on ", by_index_[static_cast<std::size_t>(access.stream)]->name(), " ",
                          verb(access.write), ", bytes ", access.begin, " to ", access.end);
}

}  // namespace neap::sim
