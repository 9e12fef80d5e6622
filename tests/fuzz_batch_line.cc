// libFuzzer target: any bytes as a line of a prompt file. A line becomes a request with a prompt of
// known ids or an error with a message that can be written; and never anything else.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "runtime/record.h"
#include "runtime/request_parser.h"
#include "runtime/tokenizer.h"
#include "runtime/tool_calls.h"

namespace {

const colibri::Tokenizer& Tok() {
  static const colibri::Tokenizer tokenizer =
      colibri::Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  return tokenizer;
}

void Check(const colibri::ParsedLine& parsed) {
  if (!parsed.request) {
    if (parsed.error.message.empty() || parsed.error.code.empty()) std::abort();
    colibri::RecordContext context;
    context.tokenizer = &Tok();
    colibri::LineBytes(
        colibri::BuildErrorRecord(parsed.line, parsed.custom_id, parsed.error, context));
    return;
  }
  if (parsed.request->prompt.empty() || parsed.request->choices < 1) std::abort();
  for (const int32_t id : parsed.request->prompt) {
    if (!Tok().Has(id)) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  colibri::RequestDefaults defaults;
  defaults.keep_prompt_text = true;
  colibri::RequestParser parser(Tok(), Tok().Size(), 4096, defaults);
  Check(parser.Parse(line, 1));
  Check(parser.ParseText(line, 2));
  // The fields that need a whole envelope are reached more often with one around the bytes.
  Check(parser.Parse("{\"custom_id\":\"a\",\"body\":{" + std::string(line) + "}}", 3));
  colibri::ParseToolCalls("<tool_call>f" + std::string(line), {});
  return 0;
}
