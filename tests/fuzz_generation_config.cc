// libFuzzer: any bytes as generation_config.json beside a sound config.json. Refused with a
// ModelError or understood; nothing else.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "io/error.h"
#include "runtime/config.h"

namespace {

const std::string& SoundConfig() {
  static const std::string text = [] {
    std::ifstream file(COLIBRI_SOURCE_DIR "/tests/fixtures/tiny/model/config.json");
    std::stringstream all;
    all << file.rdbuf();
    return all.str();
  }();
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const colibri::ModelConfig config = colibri::ParseConfig(SoundConfig(), text, "fuzz");
    for (const int32_t id : config.stop_ids) {
      if (id < 0 || id >= config.vocab) std::abort();
    }
  } catch (const colibri::ModelError&) {
    // The expected answer to most inputs.
  }
  return 0;
}
