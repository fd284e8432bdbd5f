#include "neap/memory/pool_core.h"

#include <atomic>

namespace neap::memory {

int64_t whole_granules(int64_t bytes) {
  NEAP_ASSERT(bytes >= 0 && bytes <= kMaxPoolBytes, "host block of ", bytes, " bytes");
  return std::max<int64_t>((bytes + kGranularity - 1) / kGranularity, 1) * kGranularity;
}

void check_pool_options(const PoolOptions& options) {
  const auto check = [](const char* name, Bytes value, int64_t least) {
    NEAP_CHECK(value.count >= least && value.count <= kMaxPoolBytes, "[memory.", name, "] expected ", least, " to ",
               kMaxPoolBytes, " bytes; found ", value.count);
  };
  check("slab_size", options.slab_size, 1);
  check("host_cache_limit", options.cache_limit, 0);
  if (options.host_limit) check("host_limit", *options.host_limit, 0);
}

uint64_t next_block_serial() {
  static std::atomic<uint64_t> serial = 0;
  return ++serial;  // 0 is never given, so a default PoolBlock is not held anywhere
}

}  // namespace neap::memory
