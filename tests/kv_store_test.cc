// Pages of keys and values: what is taken, given back and where positions lie.
#include "runtime/kv_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/weights.h"

namespace colibri {
namespace {

KvShape Shape(int32_t page_tokens = 4) {
  KvShape shape;
  shape.layers = 3;
  shape.latent_width = 6;
  shape.index_width = 5;
  shape.has_index = {true, false, true};
  shape.page_tokens = page_tokens;
  shape.type = KvType::kF32;
  return shape;
}

TEST_CASE("pages are taken on demand and all come back") {
  KvStore kv(Shape(), 5);
  KvPages a, b;
  CHECK(kv.Grow(&a, 1));
  CHECK(a.ids.size() == 1);
  CHECK(kv.Grow(&a, 4));
  CHECK(a.ids.size() == 1);
  CHECK(kv.Grow(&a, 5));
  CHECK(a.ids.size() == 2);
  CHECK(kv.Grow(&b, 9));
  CHECK(kv.FreePages() == 0);
  kv.Release(&a);
  CHECK(a.ids.empty());
  CHECK(kv.FreePages() == 2);
  kv.Release(&b);
  kv.Release(&b);  // nothing left to give back
  CHECK(kv.FreePages() == kv.Pages());
}

TEST_CASE("a growth that does not fit takes nothing") {
  KvStore kv(Shape(), 3);
  KvPages a, b;
  REQUIRE(kv.Grow(&a, 8));
  CHECK_FALSE(kv.Grow(&b, 5));
  CHECK(b.ids.empty());
  CHECK(kv.FreePages() == 1);
  CHECK_FALSE(kv.Grow(&a, 17));
  CHECK(a.ids.size() == 2);
  CHECK(kv.Grow(&a, 12));
}

TEST_CASE("growing to fewer positions than there are keeps the pages") {
  KvStore kv(Shape(), 3);
  KvPages a;
  REQUIRE(kv.Grow(&a, 12));
  CHECK(kv.Grow(&a, 1));
  CHECK(a.ids.size() == 3);
}

TEST_CASE("pages for tokens are rounded up") {
  KvStore kv(Shape(), 1);
  CHECK(kv.PagesFor(0) == 0);
  CHECK(kv.PagesFor(1) == 1);
  CHECK(kv.PagesFor(4) == 1);
  CHECK(kv.PagesFor(5) == 2);
  CHECK(kv.PagesFor(int64_t{1} << 20) == 1 << 18);
}

TEST_CASE("no two positions of any layer and sequence share a byte") {
  for (const KvType type : {KvType::kF32, KvType::kBF16}) {
    KvShape shape = Shape();
    shape.type = type;
    KvStore kv(shape, 4);
    KvPages a, b;
    REQUIRE(kv.Grow(&a, 5));
    REQUIRE(kv.Grow(&b, 6));
    std::vector<std::pair<std::byte*, size_t>> places;
    for (int32_t layer = 0; layer < 3; ++layer) {
      for (const KvPages* pages : {&a, &b}) {
        for (int32_t p = 0; p < (pages == &a ? 5 : 6); ++p) {
          places.emplace_back(kv.LatentAt(layer, *pages, p), 6 * KvBytes(type));
          if (layer == 1) continue;
          places.emplace_back(kv.IndexKeyAt(layer, *pages, p), 5 * KvBytes(type));
        }
      }
    }
    for (size_t i = 0; i < places.size(); ++i) {
      std::memset(places[i].first, static_cast<int>(i), places[i].second);
    }
    for (size_t i = 0; i < places.size(); ++i) {
      const auto [at, bytes] = places[i];
      CHECK(std::all_of(at, at + bytes, [&](std::byte v) { return v == std::byte(i); }));
    }
  }
}

TEST_CASE("positions of a page follow each other, pages lie where their id says") {
  KvStore kv(Shape(), 4);
  KvPages pages;
  REQUIRE(kv.Grow(&pages, 9));
  CHECK(std::set<int32_t>(pages.ids.begin(), pages.ids.end()).size() == 3);
  for (int32_t p = 0; p < 9; ++p) {
    const auto page = static_cast<size_t>(p / 4);
    CHECK(kv.LatentAt(2, pages, p) == kv.Latents(2, pages.ids[page]) + p % 4 * 6 * 4);
    CHECK(kv.IndexKeyAt(2, pages, p) == kv.IndexKeys(2, pages.ids[page]) + p % 4 * 5 * 4);
  }
}

TEST_CASE("bytes of a page count every layer, index keys only where there are some") {
  CHECK(Shape().LatentPageBytes() == 4 * 6 * 4);
  CHECK(Shape().IndexPageBytes() == 4 * 5 * 4);
  CHECK(Shape().PageBytes() == 3 * 96 + 2 * 80);
  KvShape half = Shape(32);
  half.type = KvType::kBF16;
  CHECK(half.PageBytes() == 3 * 32 * 6 * 2 + 2 * 32 * 5 * 2);
}

TEST_CASE("the shape of a model has the MTP layer, index keys of full layers and no others") {
  Model model({COLIBRI_SOURCE_DIR "/tests/fixtures/tiny/model"});
  const KvShape shape = KvShapeOf(model, 16, KvType::kBF16);
  CHECK(shape.layers == 8);
  CHECK(shape.latent_width == 48);
  CHECK(shape.index_width == 32);
  CHECK(shape.has_index == std::vector<bool>{true, true, false, true, false, false, true, true});
  model.DropIndexer();
  const KvShape dense = KvShapeOf(model, 16, KvType::kBF16);
  CHECK(dense.index_width == 0);
  CHECK(std::count(dense.has_index.begin(), dense.has_index.end(), true) == 0);
}

// `count` tokens, all different, of a text of its own.
std::vector<int32_t> Text(int32_t count, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Pages for `tokens`, published as far as they are full, and left to nobody.
void StoreAndLeave(KvStore* kv, const std::vector<int32_t>& tokens) {
  KvPages pages;
  REQUIRE(kv->Grow(&pages, static_cast<int64_t>(tokens.size())));
  kv->Publish(&pages, tokens);
  kv->Release(&pages);
}

TEST_CASE("full pages are found by their tokens, by reference, and freed with the last user") {
  KvStore kv(Shape(), 6);
  KvPages a, b, c;
  REQUIRE(kv.Grow(&a, 11));
  CHECK(kv.Share(&b, Text(11)) == 0);  // not stored yet
  kv.Publish(&a, Text(10));
  CHECK(a.known == 2);
  CHECK(kv.Share(&b, Text(11)) == 8);
  CHECK(b.ids == std::vector<int32_t>{a.ids[0], a.ids[1]});
  CHECK(kv.Share(&c, Text(7)) == 4);
  CHECK(kv.FreePages() == 3);
  kv.Release(&a);
  CHECK(kv.FreePages() == 4);
  kv.Release(&b);
  CHECK(kv.FreePages() == 5);  // the first page has a user still
  kv.Release(&c);
  CHECK(kv.FreePages() == 6);
  CHECK(kv.Share(&a, Text(30)) == 8);  // known without users
  CHECK(kv.FreePages() == 4);
}

TEST_CASE("tokens of a page are found only behind the same tokens before it") {
  KvStore kv(Shape(), 8);
  StoreAndLeave(&kv, Text(8));
  std::vector<int32_t> other = Text(8);
  other[0] = 99;
  CHECK(kv.Find(other).pages == 0);
  StoreAndLeave(&kv, other);
  CHECK(kv.Find(other).pages == 2);
  CHECK(kv.Find(Text(8)).pages == 2);
  CHECK(kv.FreePages() == 8);
  CHECK(kv.Find(Text(4, 4)).pages == 0);  // not at the start
  other = Text(8);
  other[7] = 99;
  CHECK(kv.Find(other).pages == 1);
}

TEST_CASE("pages without users are taken when no other is free, the longest unused first") {
  KvStore kv(Shape(), 6);
  StoreAndLeave(&kv, Text(8));
  StoreAndLeave(&kv, Text(8, 100));
  KvPages a, b;
  REQUIRE(kv.Grow(&a, 8));
  CHECK(kv.Find(Text(8)).pages == 2);
  CHECK(kv.Share(&b, Text(8)) == 8);
  kv.Release(&b);  // used last
  REQUIRE(kv.Grow(&a, 12));
  CHECK(kv.Find(Text(8, 100)).pages == 1);  // the end of a chain goes first
  REQUIRE(kv.Grow(&a, 16));
  CHECK(kv.Find(Text(8, 100)).pages == 0);
  CHECK(kv.Find(Text(8)).pages == 2);
  CHECK(kv.Find(Text(8)).free == 2);
  REQUIRE(kv.Grow(&a, 24));
  CHECK(kv.Find(Text(8)).pages == 0);
  CHECK_FALSE(kv.Grow(&b, 1));
}

TEST_CASE("what two sequences stored at once is held once") {
  KvStore kv(Shape(), 6);
  KvPages a, b;
  REQUIRE(kv.Grow(&a, 9));
  REQUIRE(kv.Grow(&b, 9));
  kv.Publish(&a, Text(8));
  kv.Publish(&b, Text(8));
  CHECK(b.ids[0] == a.ids[0]);
  CHECK(b.ids[1] == a.ids[1]);
  CHECK(b.ids[2] != a.ids[2]);
  CHECK(kv.FreePages() == 2);
  kv.Release(&a);
  kv.Release(&b);
  CHECK(kv.FreePages() == 6);
}

TEST_CASE("only pages that are not known and not shared may be written to") {
  KvStore kv(Shape(), 6);
  KvPages a, b;
  REQUIRE(kv.Grow(&a, 12));
  CHECK(kv.Writable(a, 0, 12));
  kv.Publish(&a, Text(9));
  CHECK_FALSE(kv.Writable(a, 7, 1));
  CHECK_FALSE(kv.Writable(a, 7, 5));
  CHECK(kv.Writable(a, 8, 4));
  kv.Share(&b, Text(9));
  REQUIRE(kv.Grow(&b, 12));
  CHECK_FALSE(kv.Writable(b, 7, 5));
  CHECK(kv.Writable(b, 8, 4));
}

TEST_CASE("pages stay right through any order of users, growth and evictions") {
  // What is stored at a position says all tokens up to it; these are few, so that prefixes meet all
  // the time, and so do pages with the same tokens behind others.
  std::mt19937 random(3);
  KvStore kv(Shape(), 12);
  struct User {
    std::vector<int32_t> text;
    KvPages pages;
    int32_t Stored(size_t position) const {  // text up to there as the digits of a number
      return std::accumulate(text.begin(), text.begin() + static_cast<int64_t>(position) + 1, 1,
                             [](int32_t n, int32_t token) { return 2 * n + token; });
    }
  };
  std::vector<User> users(4);
  size_t shared = 0, full = 0;
  for (int step = 0; step < 4000; ++step) {
    User& user = users[random() % users.size()];
    if (user.pages.ids.empty()) {
      user.text.resize(1 + random() % 20);
      for (int32_t& token : user.text) token = random() % 8 == 0 ? 1 : 0;
      const int32_t found = kv.Share(&user.pages, user.text);
      shared += found > 0 ? 1 : 0;
      const auto count = static_cast<int32_t>(user.text.size());
      if (!kv.Grow(&user.pages, count)) {
        ++full;
        kv.Release(&user.pages);
        continue;
      }
      if (count > found) REQUIRE(kv.Writable(user.pages, found, count - found));
      for (int32_t p = found; p < count; ++p) {
        const int32_t value = user.Stored(static_cast<size_t>(p));
        std::memcpy(kv.LatentAt(1, user.pages, p), &value, 4);
      }
    } else if (random() % 2 == 0) {
      kv.Publish(&user.pages, user.text);
    } else {
      kv.Release(&user.pages);
    }
    for (const User& one : users) {
      if (one.pages.ids.empty()) continue;
      for (size_t p = 0; p < one.text.size(); ++p) {
        int32_t value = 0;
        std::memcpy(&value, kv.LatentAt(1, one.pages, static_cast<int32_t>(p)), 4);
        REQUIRE(value == one.Stored(p));
      }
    }
  }
  CHECK(shared > 300);
  CHECK(full > 10);
  for (User& user : users) kv.Release(&user.pages);
  CHECK(kv.FreePages() == 12);
}

}  // namespace
}  // namespace colibri
