#include "neap/comm/agreement.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <numeric>

#include "neap/base/error.h"
#include "neap/comm/world.h"

namespace neap::comm {

int rank_of(const World* world) { return world == nullptr ? 0 : world->rank(); }
int size_of(const World* world) { return world == nullptr ? 1 : world->size(); }

std::vector<std::string> exchange_texts(World* world, const std::string& mine, const char* unit) {
  if (size_of(world) == 1) return {mine};
  const int ranks = world->size();
  const at::Tensor lengths = at::empty({ranks}, at::kLong);
  auto* length = lengths.mutable_data_ptr<int64_t>();
  length[world->rank()] = static_cast<int64_t>(mine.size());
  world->all().all_gather(lengths, unit).wait();

  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  const std::vector<int64_t> pieces(length, length + ranks);
  const int64_t total = std::accumulate(pieces.begin(), pieces.end(), int64_t{0});
  if (total == 0) return texts;
  const at::Tensor all = at::empty({total}, at::kByte);
  auto* bytes = all.mutable_data_ptr<uint8_t>();
  const int64_t before = std::accumulate(pieces.begin(), pieces.begin() + world->rank(), int64_t{0});
  std::memcpy(bytes + before, mine.data(), mine.size());
  world->all().all_gather(all, unit, pieces).wait();
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank].assign(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(pieces[rank]));
    bytes += pieces[rank];
  }
  return texts;
}

void raise_first(const std::vector<std::string>& errors, int rank) {
  const std::string& own = errors[static_cast<std::size_t>(rank)];
  if (!own.empty()) throw UserError(own);
  for (std::size_t other = 0; other < errors.size(); ++other) {
    if (!errors[other].empty()) NEAP_USER_ERROR(errors[other], " (so says rank ", other, ")");
  }
}

void together(World* world, const char* unit, c10::function_ref<void()> body) {
  std::string error;
  try {
    body();
  } catch (const UserError& caught) {
    error = caught.what();
  }
  raise_first(exchange_texts(world, error, unit), rank_of(world));
}

}  // namespace neap::comm
