#include "runtime/prefix_index.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>

#include "io/check.h"

namespace colibri {
namespace {

size_t S(int32_t v) { return static_cast<size_t>(v); }

}  // namespace

PrefixIndex::PrefixIndex(int32_t pages, int32_t page_tokens)
    : page_tokens_(S(page_tokens)),
      buckets_(std::bit_ceil(S(pages) + 1), kNone),
      next_(S(pages), kNone),
      serials_(S(pages), kRoot),
      before_(S(pages), kRoot),
      tokens_(S(pages) * page_tokens_) {}

size_t PrefixIndex::Bucket(uint64_t before, std::span<const int32_t> tokens) const {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), before) & (buckets_.size() - 1);
}

std::span<const int32_t> PrefixIndex::TokensOf(int32_t page) const {
  return {tokens_.data() + S(page) * page_tokens_, page_tokens_};
}

int32_t PrefixIndex::Find(uint64_t before, std::span<const int32_t> tokens) const {
  COLIBRI_DCHECK(tokens.size() == page_tokens_);
  for (int32_t page = buckets_[Bucket(before, tokens)]; page != kNone; page = next_[S(page)]) {
    if (before_[S(page)] == before && std::ranges::equal(TokensOf(page), tokens)) return page;
  }
  return kNone;
}

void PrefixIndex::Add(int32_t page, uint64_t before, std::span<const int32_t> tokens) {
  COLIBRI_DCHECK(!Knows(page) && Find(before, tokens) == kNone);
  int32_t& bucket = buckets_[Bucket(before, tokens)];
  next_[S(page)] = bucket;
  bucket = page;
  serials_[S(page)] = ++last_serial_;
  before_[S(page)] = before;
  std::ranges::copy(tokens, tokens_.begin() + static_cast<int64_t>(S(page) * page_tokens_));
}

void PrefixIndex::Remove(int32_t page) {
  COLIBRI_DCHECK(Knows(page));
  int32_t* link = &buckets_[Bucket(before_[S(page)], TokensOf(page))];
  while (*link != page) link = &next_[S(*link)];
  *link = next_[S(page)];
  serials_[S(page)] = kRoot;
}

}  // namespace colibri
