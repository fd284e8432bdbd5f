#include "neap/memory/free_list.h"

#include <iterator>

#include "neap/base/error.h"

namespace neap::memory {

void FreeList::add_slab(int32_t slab, int64_t size) {
  NEAP_ASSERT(size > 0, "slab ", slab, " of ", size, " bytes");
  NEAP_ASSERT(slabs_.emplace(slab, size).second, "slab ", slab, " added twice");
  insert_free({slab, 0}, size);
}

void FreeList::remove_slab(int32_t slab) {
  NEAP_ASSERT(slab_is_free(slab), "slab ", slab, " removed while blocks of it are out");
  erase_free(chunks_.find({slab, 0}));
  slabs_.erase(slab);
}

std::optional<FreeList::Place> FreeList::allocate(int64_t size) {
  NEAP_ASSERT(size > 0, "block of ", size, " bytes");
  const auto best = free_.lower_bound({size, {}});
  if (best == free_.end()) return std::nullopt;
  const auto [had, place] = *best;
  const auto chunk = chunks_.find(place);
  if (had > size) {
    // What is left over takes the node that stood for the whole.
    const Place rest{place.slab, place.offset + size};
    chunks_.emplace_hint(std::next(chunk), rest, Chunk{had - size, /*free=*/true});
    replace_free(best, {had - size, rest});
  } else {
    free_.erase(best);
  }
  chunk->second = {size, /*free=*/false};
  free_bytes_ -= size;
  return place;
}

bool FreeList::release(Place place) {
  auto block = chunks_.find(place);
  NEAP_ASSERT(block != chunks_.end() && !block->second.free, "no block at offset ", place.offset, " of slab ",
              place.slab, ": released twice, or not of this pool");
  free_bytes_ += block->second.size;
  block->second.free = true;
  auto neighbour = free_.end();  // a free one, whose node will stand for the whole
  if (const auto next = std::next(block);
      next != chunks_.end() && next->first.slab == place.slab && next->second.free) {
    neighbour = free_.find({next->second.size, next->first});
    block->second.size += next->second.size;
    chunks_.erase(next);
  }
  if (block != chunks_.begin()) {
    if (const auto before = std::prev(block); before->first.slab == place.slab && before->second.free) {
      if (neighbour != free_.end()) free_.erase(neighbour);
      neighbour = free_.find({before->second.size, before->first});
      before->second.size += block->second.size;
      chunks_.erase(block);
      block = before;
    }
  }
  const BySize whole{block->second.size, block->first};
  if (neighbour == free_.end()) {
    free_.insert(whole);
  } else {
    replace_free(neighbour, whole);
  }
  return whole.size == slabs_.at(place.slab);
}

bool FreeList::slab_is_free(int32_t slab) const {
  const auto size = slabs_.find(slab);
  NEAP_ASSERT(size != slabs_.end(), "slab ", slab, " is not in the list");
  const auto& first = chunks_.at({slab, 0});
  return first.free && first.size == size->second;
}

int64_t FreeList::block_size(Place place) const {
  const auto block = chunks_.find(place);
  return block == chunks_.end() || block->second.free ? 0 : block->second.size;
}

int64_t FreeList::largest_free() const { return free_.empty() ? 0 : free_.rbegin()->size; }

void FreeList::insert_free(Place place, int64_t size) {
  chunks_.emplace(place, Chunk{size, /*free=*/true});
  free_.insert({size, place});
  free_bytes_ += size;
}

void FreeList::replace_free(BySizes::iterator chunk, BySize with) {
  auto node = free_.extract(chunk);
  node.value() = with;
  free_.insert(std::move(node));
}

void FreeList::erase_free(Chunks::iterator chunk) {
  free_.erase({chunk->second.size, chunk->first});
  free_bytes_ -= chunk->second.size;
  chunks_.erase(chunk);
}

void FreeList::check() const {
  int64_t free_bytes = 0;
  size_t free_chunks = 0;
  auto slab = slabs_.begin();
  auto chunk = chunks_.begin();
  for (; slab != slabs_.end(); ++slab) {
    int64_t at = 0;
    bool before_free = false;
    for (; chunk != chunks_.end() && chunk->first.slab == slab->first; ++chunk) {
      const auto& [place, here] = *chunk;
      NEAP_ASSERT(place.offset == at && here.size > 0, "gap or overlap at ", place.offset, " of slab ", place.slab);
      NEAP_ASSERT(!(before_free && here.free), "two free neighbours at ", place.offset, " of slab ", place.slab);
      NEAP_ASSERT(!here.free || free_.contains({here.size, place}), "free chunk that cannot be found by size");
      at += here.size;
      before_free = here.free;
      if (here.free) free_bytes += here.size, ++free_chunks;
    }
    NEAP_ASSERT(at == slab->second, "slab ", slab->first, " has ", slab->second, " bytes, its chunks ", at);
  }
  NEAP_ASSERT(chunk == chunks_.end(), "chunk of a slab that is gone");
  NEAP_ASSERT(free_bytes == free_bytes_ && free_chunks == free_.size(), "free bytes are miscounted");
}

}  // namespace neap::memory
