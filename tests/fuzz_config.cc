// libFuzzer: any bytes as config.json and, after a NUL, generation_config.json. Refused with a
// ModelError or understood; nothing else.
#include <cstdint>
#include <string_view>

#include "io/error.h"
#include "runtime/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t nul = text.find('\0');
  const bool two = nul != std::string_view::npos;
  try {
    const colibri::ModelConfig config = colibri::ParseConfig(
        two ? text.substr(0, nul) : text, two ? text.substr(nul + 1) : "", "fuzz");
    if (config.sparse.size() != config.full_indexer.size()) __builtin_trap();
  } catch (const colibri::ModelError&) {
    // The expected answer to most inputs.
  }
  return 0;
}
