// libFuzzer: any bytes as a shard. Refused with a ModelError or read; nothing else.
#include <cstdint>
#include <string>
#include <string_view>

#include "io/error.h"
#include "io/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  // Half of the corpus stands for headers of files of some other length.
  const uint64_t file_bytes = size % 2 == 0 ? size + 8 : size * 16;
  try {
    const colibri::SafetensorsHeader header =
        colibri::ParseSafetensorsHeader(text, size + 8, file_bytes, "fuzz");
    for (const auto& [name, entry] : header.tensors) {
      if (entry.offset + entry.bytes > file_bytes) __builtin_trap();
    }
  } catch (const colibri::ModelError&) {
    // The expected answer to most inputs.
  }
  return 0;
}
