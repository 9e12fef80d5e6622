// libFuzzer: any bytes as the messages of a chat and, after a NUL, its tools. Refused with a
// message that can be written, or rendered to pieces that a tokenizer takes; nothing else.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "runtime/chat_messages.h"
#include "runtime/chat_template.h"
#include "runtime/json_text.h"

namespace {

using Json = nlohmann::ordered_json;

void Render(std::string_view messages_text, std::string_view tools_text) {
  const Json messages = colibri::CheckedMessages(colibri::ParseJson(messages_text));
  const Json tools = tools_text.empty() ? Json() : colibri::ParseJson(tools_text);
  if (!tools.is_null()) colibri::CheckTools(tools);
  colibri::MediaWarnings(messages);
  colibri::LastUserText(messages);
  constexpr size_t kMost = 1 << 20;
  for (const bool thinking : {true, false}) {
    colibri::TemplateArguments arguments;
    arguments.enable_thinking = arguments.clear_thinking = thinking;
    size_t bytes = 0;
    for (const colibri::PromptPiece& piece :
         colibri::RenderChat(messages, tools, arguments, {kMost, 1000})) {
      bytes += piece.text.size();
    }
    if (bytes > kMost + 1000) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t nul = text.find('\0');
  try {
    Render(text.substr(0, nul), nul == text.npos ? "" : text.substr(nul + 1));
  } catch (const colibri::LineRefusal& refusal) {
    if (refusal.error.message.empty() || refusal.error.code.empty()) std::abort();
  } catch (const colibri::TemplateError& error) {
    if (*error.what() == '\0') std::abort();
  } catch (const std::invalid_argument&) {
    // Not JSON.
  }
  return 0;
}
