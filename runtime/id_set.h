// The custom_ids seen so far, as 128-bit hashes: at most 32 bytes a line, so that files of a
// hundred million lines can be checked. Two different ids count as the same with probability below
// 1e-20. Threads: one at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace colibri {

class IdSet {
 public:
  // False: `id` was there already.
  bool Insert(std::string_view id);
  size_t Count() const { return count_; }
  size_t Bytes() const;  // held by the table

 private:
  struct Hash {
    uint64_t low = 0, high = 0;  // both 0: an empty place
    bool operator==(const Hash&) const = default;
  };
  struct Shard {
    std::vector<Hash> places;
    size_t used = 0;
  };
  static bool Place(std::vector<Hash>* places, const Hash& hash);

  // 256 tables that grow one by one: growing holds one of them twice, not everything.
  std::array<Shard, 256> shards_;
  size_t count_ = 0;
};

}  // namespace colibri
