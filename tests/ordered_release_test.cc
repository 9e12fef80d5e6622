#include "runtime/ordered_release.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

using colibri::OrderedRelease;

namespace {

constexpr uint32_t kNone = 99;

struct Emitted {
  std::string text;              // of all records
  std::vector<uint32_t> tokens;  // freed, in order
  std::vector<uint64_t> lines;   // of outcomes, in order
  OrderedRelease::Emit Into() {
    return [this](const std::string& record, uint32_t token, const OrderedRelease::Line& line) {
      text += record;
      if (token != kNone) tokens.push_back(token);
      if (line) lines.push_back(line->line);
    };
  }
};

}  // namespace

TEST_CASE("records leave in the order of their lines whatever order they end in") {
  std::vector<uint64_t> order = {2, 3, 5, 7, 11};
  do {
    Emitted out;
    OrderedRelease release(out.Into(), kNone, size_t{1} << 20);
    for (const uint64_t line : {2u, 3u, 5u, 7u, 11u}) release.Expect(line);
    for (const uint64_t line : order) {
      release.Finish(line, std::to_string(line) + ",", static_cast<uint32_t>(line));
    }
    CHECK(out.text == "2,3,5,7,11,");
    CHECK(out.tokens.size() == 5);
    CHECK(release.HeldBytes() == 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("only what is ahead of its turn waits, and its sequence is free at once") {
  Emitted out;
  OrderedRelease release(out.Into(), kNone, size_t{1} << 20);
  release.Expect(1);
  release.Finish(1, "1", 1);
  CHECK(out.text == "1");
  release.Expect(2);
  release.Expect(3);
  release.Finish(3, "3", 30);
  CHECK(out.text == "1");
  CHECK(out.tokens == std::vector<uint32_t>{1, 30});
  CHECK(release.HeldBytes() == 1);
  release.Finish(2, "2", 20);
  CHECK(out.text == "123");
  CHECK(out.tokens == std::vector<uint32_t>{1, 30, 20});
}

TEST_CASE("what became of a line goes with its record, not with its sequence") {
  Emitted out;
  OrderedRelease release(out.Into(), kNone, size_t{1} << 20);
  const auto outcome = [](uint64_t line) {
    auto made = std::make_shared<colibri::LineOutcome>();
    made->line = line;
    return made;
  };
  release.Expect(1);
  release.Expect(2);
  release.Finish(2, "2", 20, outcome(2));
  CHECK(out.tokens == std::vector<uint32_t>{20});
  CHECK(out.lines.empty());
  release.Finish(1, "1", 10, outcome(1));
  CHECK(out.lines == std::vector<uint64_t>{1, 2});
}

TEST_CASE("beyond the memory for waiting records their sequences wait with them") {
  Emitted out;
  OrderedRelease release(out.Into(), kNone, 10);
  for (const uint64_t line : {1u, 2u, 3u}) release.Expect(line);
  release.Finish(2, "12345678", 20);
  release.Finish(3, "abc", 30);
  CHECK(out.tokens == std::vector<uint32_t>{20});
  release.Finish(1, "!", 10);
  CHECK(out.text == "!12345678abc");
  CHECK(out.tokens == std::vector<uint32_t>{20, 10, 30});
}

TEST_CASE("an interrupted run gives out what is finished, gaps left out") {
  Emitted out;
  OrderedRelease release(out.Into(), kNone, size_t{1} << 20);
  for (const uint64_t line : {1u, 2u, 3u, 4u}) release.Expect(line);
  release.Finish(4, "4", 4);
  release.Finish(2, "2", 2);
  release.Flush();
  CHECK(out.text == "24");
  release.Flush();
  CHECK(out.text == "24");
}
