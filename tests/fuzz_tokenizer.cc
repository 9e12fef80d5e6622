// Any bytes as tokenizer.json, then any bytes as text: a ModelError or a round trip, nothing else.
// Inputs are "<json>\0<text>".
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "io/error.h"
#include "runtime/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = input.find('\0');
  const std::string_view json = input.substr(0, zero);
  std::string text(zero == input.npos ? "it's 12345 \xff\xc3\xa9  \n" : input.substr(zero + 1));
  // Patterns may take time that grows with a power of the text's length.
  if (text.size() > 256) text.resize(256);
  try {
    const colibri::Tokenizer tokenizer = colibri::Tokenizer::Parse(json, "fuzz");
    const auto ids = tokenizer.Encode(text, colibri::AddedTokens::kRecognise);
    colibri::StreamDecoder decoder(tokenizer, colibri::SpecialTokens::kKeep);
    std::string streamed;
    for (const int32_t id : ids) streamed += decoder.Push(id);
    streamed += decoder.Flush();
    if (streamed != tokenizer.Decode(ids, colibri::SpecialTokens::kKeep)) std::abort();
  } catch (const colibri::ModelError&) {
  }
  return 0;
}
