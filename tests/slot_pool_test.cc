// SlotPool: sizes, alignment, separate slots, refusal.
#include "io/slot_pool.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "io/error.h"
#include "io/reader.h"

namespace colibri {
namespace {

TEST_CASE("slots are aligned, rounded up and do not overlap") {
  SlotPool pool({{10'000, 3}, {4096, 2}});
  CHECK(pool.Classes() == 2);
  CHECK(pool.Count(0) == 3);
  CHECK(pool.Count(1) == 2);
  CHECK(pool.SlotBytes(0) == 12'288);
  CHECK(pool.SlotBytes(1) == 4096);
  CHECK(pool.TotalBytes() == 3 * 12'288 + 2 * 4096);
  for (uint32_t slot = 0; slot < 3; ++slot) {
    CHECK(reinterpret_cast<uintptr_t>(pool.Data(0, slot)) % kIoAlign == 0);
    std::memset(pool.Data(0, slot), static_cast<int>(slot + 1), pool.SlotBytes(0));
  }
  for (uint32_t slot = 0; slot < 2; ++slot) {
    std::memset(pool.Data(1, slot), static_cast<int>(slot + 4), pool.SlotBytes(1));
  }
  for (uint32_t slot = 0; slot < 3; ++slot) {
    CHECK(pool.Data(0, slot)[0] == static_cast<std::byte>(slot + 1));
    CHECK(pool.Data(0, slot)[12'287] == static_cast<std::byte>(slot + 1));
  }
  CHECK(pool.Data(1, 0)[4095] == std::byte{4});
  CHECK(pool.Data(1, 1)[4095] == std::byte{5});
}

TEST_CASE("a pool of several huge pages is zero and writable to its last byte") {
  SlotPool pool({{(uint64_t{3} << 20) + 1, 3}});
  CHECK(pool.SlotBytes(0) == (uint64_t{3} << 20) + 4096);
  std::byte* last = pool.Data(0, 2) + pool.SlotBytes(0) - 1;
  CHECK(*last == std::byte{0});
  *last = std::byte{7};
  CHECK(*last == std::byte{7});
}

TEST_CASE("slots ask for huge pages and begin on one, where the kernel has them") {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) return;
  SlotPool pool({{(uint64_t{5} << 20) + 1, 4}});
  const auto at = reinterpret_cast<uintptr_t>(pool.Data(0, 0));
  CHECK(at % (uint64_t{2} << 20) == 0);
  // Mappings and their properties; the flag hg is MADV_HUGEPAGE.
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  std::string flags;
  for (std::string line; flags.empty() && std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) inside = begin <= at && at < end;
    if (inside && line.starts_with("VmFlags:")) flags = line + " ";
  }
  CHECK(flags.find(" hg ") != std::string::npos);
}

TEST_CASE("a class without slots and a pool without classes take no memory") {
  SlotPool none({});
  CHECK(none.Classes() == 0);
  CHECK(none.TotalBytes() == 0);
  SlotPool empty({{4096, 0}, {4096, 1}});
  CHECK(empty.TotalBytes() == 4096);
  CHECK(empty.Count(0) == 0);
}

TEST_CASE("memory that cannot be had is an error that names the size") {
  for (const uint64_t bytes : {uint64_t{1} << 46, ~uint64_t{0}}) {
    std::string message;
    try {
      SlotPool pool({{4096, 1}, {bytes, 4}});
    } catch (const IoError& error) {
      message = error.what();
    }
    CHECK(message.find("4 expert slots of " + std::to_string(bytes) + " bytes") !=
          std::string::npos);
  }
}

}  // namespace
}  // namespace colibri
