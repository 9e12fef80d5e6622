// libFuzzer: any bytes as .coli_usage. Refused with an IoError that names file and line, or counts
// of experts that there are; nothing else.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "io/error.h"
#include "runtime/usage_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int32_t kLayers = 6, kExperts = 32;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const colibri::ExpertUsage usage = colibri::ParseUsage(text, "fuzz", kLayers, kExperts);
    for (const float heat : colibri::HeatOf(usage, 4, 16)) {
      if (!(heat >= 0 && heat <= 1)) std::abort();
    }
  } catch (const colibri::IoError& error) {
    if (std::string_view(error.what()).find("fuzz: line ") != 0) std::abort();
  }
  return 0;
}
