#include "runtime/id_set.h"

#include <xxhash.h>

#include <utility>

namespace colibri {

bool IdSet::Place(std::vector<Hash>* places, const Hash& hash) {
  for (size_t i = hash.low % places->size();; i = i + 1 == places->size() ? 0 : i + 1) {
    Hash& place = (*places)[i];
    if (place == hash) return false;
    if (place == Hash{}) {
      place = hash;
      return true;
    }
  }
}

bool IdSet::Insert(std::string_view id) {
  const XXH128_hash_t digest = XXH3_128bits(id.data(), id.size());
  Hash hash{digest.low64, digest.high64};
  if (hash == Hash{}) hash.low = 1;
  Shard& shard = shards_[hash.high >> 56];
  // Full to 85 %, then half as large again: between 19 and 29 bytes an id.
  if (shard.used * 20 >= shard.places.size() * 17) {
    std::vector<Hash> larger(shard.places.size() * 3 / 2 + 4);
    for (const Hash& old : shard.places) {
      if (old != Hash{}) Place(&larger, old);
    }
    shard.places = std::move(larger);
  }
  if (!Place(&shard.places, hash)) return false;
  ++shard.used;
  ++count_;
  return true;
}

size_t IdSet::Bytes() const {
  size_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.places.capacity() * sizeof(Hash);
  return bytes;
}

}  // namespace colibri
