// torch-free
// Which bytes of which slab are free: arithmetic only, it touches no memory.
//
// A request gets the smallest free chunk that holds it, among equal ones the one in the oldest slab at the lowest
// offset: the same requests in the same order get the same places on every run, and younger slabs drain first.
// Neighbouring free chunks of a slab are always one. All operations are O(log n); nodes are recycled, so a steady load
// allocates nothing. Not thread-safe.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>

namespace neap::memory {

class FreeList {
 public:
  struct Place {
    int32_t slab = -1;
    int64_t offset = 0;
    auto operator<=>(const Place&) const = default;
  };

  FreeList() = default;
  FreeList(const FreeList&) = delete;
  FreeList& operator=(const FreeList&) = delete;

  // REQUIRES: size > 0; `slab` is not in the list. Ids order slabs by age.
  void add_slab(int32_t slab, int64_t size);
  // REQUIRES: the slab is in the list and wholly free.
  void remove_slab(int32_t slab);

  // Exactly `size` bytes, or nothing. REQUIRES: size > 0.
  [[nodiscard]] std::optional<Place> allocate(int64_t size);
  // InternalError when no block starts there (released twice, or never handed out). Returns true when its slab is
  // wholly free now.
  bool release(Place place);

  [[nodiscard]] bool slab_is_free(int32_t slab) const;
  // Bytes of the block that starts at `place`; 0 when none does.
  [[nodiscard]] int64_t block_size(Place place) const;
  [[nodiscard]] int64_t free_bytes() const noexcept { return free_bytes_; }
  [[nodiscard]] int64_t largest_free() const;
  // Verifies every invariant in O(n log n), for tests. InternalError when one is broken.
  void check() const;

 private:
  struct Chunk {
    int64_t size;
    bool free;
  };
  struct BySize {
    int64_t size;
    Place place;
    auto operator<=>(const BySize&) const = default;
  };
  using Chunks = std::pmr::map<Place, Chunk>;
  using BySizes = std::pmr::set<BySize>;

  void insert_free(Place place, int64_t size);
  void erase_free(Chunks::iterator chunk);
  // Another free chunk takes the node of one that is no more.
  void replace_free(BySizes::iterator chunk, BySize with);

  std::pmr::unsynchronized_pool_resource nodes_;
  Chunks chunks_{&nodes_};  // all chunks, free or not, without gaps
  BySizes free_{&nodes_};
  std::pmr::map<int32_t, int64_t> slabs_{&nodes_};  // id → size
  int64_t free_bytes_ = 0;
};

}  // namespace neap::memory
