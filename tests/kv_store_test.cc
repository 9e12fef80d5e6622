// Pages of keys and values: what is taken, given back and where positions lie.
#include "runtime/kv_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
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

}  // namespace
}  // namespace colibri
