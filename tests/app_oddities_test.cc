// Odd lines of a batch file, each between two good ones that have to be answered as if it were not
// there. What a line gets is said by its row of tests/oddities.md. Two runs a theme: all lines;
// and, one after the other, the good ones with the plain form of those odd ones that are answered.
// Length: the lines are a table.
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/oddities.h"
#include "tests/temp_dir.h"

namespace colibri {
namespace {

using Json = nlohmann::json;

struct OddLine {
  std::string oddity;      // its name in the table
  std::string line;        // @: stands for an id of its own
  std::string plain = {};  // a line with the same answer; "": itself
  std::string id = {};     // in its record; "": that of @, or null where there is none to be read
  bool (*also)(const Json& record) = nullptr;
};
using OddLines = std::vector<OddLine>;

std::string Envelope(const std::string& url, const std::string& body) {
  return R"({"custom_id":"@","method":"POST","url":")" + url + R"(","body":)" + body + "}";
}
std::string Chat(const std::string& more, const std::string& messages = "") {
  const std::string hello = R"([{"role":"user","content":"Hello"}])";
  return Envelope("/v1/chat/completions", R"({"messages":)" +
                                              (messages.empty() ? hello : messages) +
                                              (more.empty() ? "" : "," + more) + "}");
}
std::string Messages(const std::string& messages) { return Chat("", messages); }
std::string Content(const std::string& content) {
  return Messages(R"([{"role":"user","content":)" + content + "}]");
}
std::string Completion(const std::string& prompt, const std::string& more = "") {
  return Envelope("/v1/completions",
                  R"({"prompt":)" + prompt + (more.empty() ? "" : "," + more) + "}");
}
const std::string kHello = R"("body":{"messages":[{"role":"user","content":"Hello"}]})";

std::string Repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

std::string WithId(std::string line, const std::string& id) {
  for (size_t at = 0; (at = line.find('@', at)) != std::string::npos; at += id.size()) {
    line.replace(at, 1, id);
  }
  return line;
}
std::string OddId(size_t i) { return fmt::format("odd-{}", i); }
std::string Neighbour(size_t i) {
  return WithId(Completion("\"The sea\""), fmt::format("good-{}", i));
}

struct Answered {
  ProgramOutcome outcome;
  std::map<uint64_t, std::string> records;
};

// Good lines at 1, 3, 5, ..., odd ones at 2, 4, 6, ...
Answered Run(const OddLines& lines, bool plainly) {
  const TempDir dir;
  std::string text = Neighbour(0) + "\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    const OddLine& odd = lines[i];
    text += WithId(!plainly || odd.plain.empty() ? odd.line : odd.plain, OddId(i)) + "\n" +
            Neighbour(i + 1) + "\n";
  }
  std::vector<std::string> arguments = {"-i", dir.Write("odd.jsonl", text)};
  if (plainly) arguments.insert(arguments.end(), {"--max-seqs", "1", "--threads", "1"});
  Answered all{RunOddities(arguments), {}};
  INFO(all.outcome.err);
  REQUIRE((all.outcome.exit_code == 0 || all.outcome.exit_code == 1));
  all.records = RecordsByLine(all.outcome.out);
  return all;
}

// The odd lines of one case: each is a subcase.
void Check(const std::string& name, const OddLines& lines) {
  const std::map<std::string, std::string> table = RowsOf("app_oddities_test: " + name);
  // Once a case, not once a subcase.
  static std::map<std::string, std::array<Answered, 2>> runs;
  if (!runs.contains(name)) runs[name] = {Run(lines, false), Run(lines, true)};
  const auto& [all, plain] = runs.at(name);
  size_t failed = 0;
  for (const auto& entry : all.records) failed += SaidBy(Json::parse(entry.second)) != "answered";
  CHECK(all.records.size() == 2 * lines.size() + 1);
  CHECK(all.outcome.exit_code == (failed > 0 ? 1 : 0));
  CHECK(Has(all.outcome.err, fmt::format("{} lines, {} failed", all.records.size(), failed)));
  CHECK(table.size() == lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const OddLine& odd = lines[i];
    SUBCASE(odd.oddity.c_str()) {
      const uint64_t number = 2 * i + 2;
      for (const uint64_t good : {number - 1, number + 1}) {
        CHECK(SaidBy(Json::parse(all.records.at(good))) == "answered");
        CHECK(LineBytes(all.records.at(good)) == LineBytes(plain.records.at(good)));
      }
      const Json record = Json::parse(all.records.at(number));
      const std::string said = SaidBy(record);
      const std::string row =
          table.contains(odd.oddity) ? table.at(odd.oddity) : "no row of this name";
      if (said == "answered") {
        CHECK_MESSAGE(row.starts_with("answered"), row);
        CHECK(LineBytes(all.records.at(number)) == LineBytes(plain.records.at(number)));
      } else {
        CHECK_MESSAGE(Fits(said, row),
                      "got | " << odd.oddity << " | " << said << " |, the table says " << row);
      }
      const bool readable = odd.line.find('@') != std::string::npos &&
                            said.find("`invalid_json`") == std::string::npos;
      const Json id = !odd.id.empty() ? Json(odd.id) : readable ? Json(OddId(i)) : Json(nullptr);
      CHECK(record.at("custom_id") == id);
      if (odd.also != nullptr) CHECK(odd.also(record));
    }
  }
}

const Json& Choices(const Json& record) { return record.at("response").at("body").at("choices"); }
int64_t PromptTokens(const Json& record) {
  return record.at("response").at("body").at("usage").at("prompt_tokens").get<int64_t>();
}

}  // namespace

TEST_CASE("a line that is no JSON object is an error of that line") {
  const std::string hello = Chat("");
  Check("a line that is no JSON object is an error of that line",
        {{"`[1]`", "[1]"},
         {"`null`", "null"},
         {"`true`", "true"},
         {"a number", "7"},
         {"a string", "\"Hello\""},
         {"plain text in a batch file", "Hello there"},
         {"a truncated line", hello.substr(0, 60)},
         {"the last brace is missing", hello.substr(0, hello.size() - 1)},
         {"a comma too many", hello.substr(0, hello.size() - 2) + ",}}"},
         {"two objects in one line", hello + " " + hello},
         {"NaN", Chat(R"("seed":NaN)")},
         {"Infinity", Chat(R"("temperature":-Infinity)")},
         {"a number beyond a double, 1e999", Chat(R"("metadata":1e999)")},
         {"a key twice in the body", Chat(R"("seed":1,"seed":2)")},
         {"a key twice in a message", Content(R"("a","content":"b")")},
         {"200 nested arrays", Repeated("[", 200) + Repeated("]", 200)},
         {"600 nested arrays", Chat("\"metadata\":" + Repeated("[", 600) + Repeated("]", 600))},
         {"100,000 open brackets", Repeated("[", 100'000)},
         {"single quotes", "{'custom_id':'@'}"},
         {"a comment", R"({"custom_id":"@" /* mine */})"},
         {"a raw tab in a string", Content("\"a\tb\"")},
         {"an unknown escape", Content(R"("\q")")}});
}

TEST_CASE("bytes that are no text are an error of that line") {
  const std::string zero("a\0b", 3);
  Check("bytes that are no text are an error of that line",
        {{"a NUL byte in a string", Content("\"" + zero + "\"")},
         {"a NUL byte before the line", zero.substr(1, 1) + Chat("")},
         {"a NUL written as an escape", Content(R"("a\u0000b")")},
         {"a byte that is no UTF-8, 0xff", Content("\"He\xff\"")},
         {"an overlong UTF-8 form", Content("\"\xc0\x80\"")},
         {"a surrogate in UTF-8", Content("\"\xed\xa0\x80\"")},
         {"a cut UTF-8 character", Content("\"\xf0\x9f\x99\"")},
         {"half of a surrogate pair as an escape", Content(R"("\ud83d")")},
         {"both halves of a surrogate pair", Content(R"("\ud83d\ude42")"), Content("\"🙂\"")},
         {"a byte order mark within the file", "\xEF\xBB\xBF" + Chat(""), Chat("")},
         {"blanks around the object", " \t" + Chat("") + "  ", Chat("")},
         {"a carriage return at the line's end", Chat("") + "\r", Chat("")},
         {"a carriage return between two objects", Chat("") + "\r" + Chat("")},
         {"emoji and letters beyond the basic plane", Content("\"🙂𝕏é\"")}});
}

TEST_CASE("a line without a usable custom_id is refused, an odd one is kept as it is") {
  const std::string rest = "," + kHello + "}";
  const std::string longest = Repeated("x", 4096);
  Check(
      "a line without a usable custom_id is refused, an odd one is kept as it is",
      {{"`{}`", "{}"},
       {"no custom_id", "{" + kHello + "}"},
       {"an empty custom_id", R"({"custom_id":"")" + rest},
       {"a number as custom_id", R"({"custom_id":7)" + rest},
       {"null as custom_id", R"({"custom_id":null)" + rest},
       {"a list as custom_id", R"({"custom_id":["a"])" + rest},
       {"custom_id in capitals", R"({"Custom_ID":"a")" + rest},
       {"a custom_id again", R"({"custom_id":"good-0")" + rest, "", "good-0"},
       {"a custom_id again, written with escapes", R"({"custom_id":"\u0067ood-0")" + rest, "",
        "good-0"},
       {"the custom_id of a line that failed", R"({"custom_id":"odd-11","body":5})", "", "odd-11"},
       {"a blank as custom_id", R"({"custom_id":" ")" + rest, "", " "},
       {"a custom_id after a line that failed with it", Chat("")},
       {"a custom_id of 4096 bytes", R"({"custom_id":")" + longest + "\"" + rest, "", longest},
       {"a custom_id of 10 kB", R"({"custom_id":")" + std::string(10000, 'x') + "\"" + rest},
       {"quotes, line ends and emoji in a custom_id", R"({"custom_id":"a\"b\n\\🙂")" + rest, "",
        "a\"b\n\\🙂"},
       {"NUL in a custom_id", R"({"custom_id":"a\u0000b")" + rest, "", std::string("a\0b", 3)}});
}

TEST_CASE("an envelope is served or refused, never guessed") {
  const std::string id = R"({"custom_id":"@",)";
  Check("an envelope is served or refused, never guessed",
        {{"no method", id + R"("url":"/v1/chat/completions",)" + kHello + "}", Chat("")},
         {"no url", id + R"("method":"POST",)" + kHello + "}", Chat("")},
         {"null as method and url", id + R"("method":null,"url":null,)" + kHello + "}", Chat("")},
         {"method GET", id + R"("method":"GET",)" + kHello + "}"},
         {"method in small letters", id + R"("method":"post",)" + kHello + "}"},
         {"a url that is not served", id + R"("url":"/v1/embeddings",)" + kHello + "}"},
         {"a whole address as url",
          id + R"("url":"https://api.openai.com/v1/chat/completions",)" + kHello + "}"},
         {"a number as url", id + R"("url":5,)" + kHello + "}"},
         {"the url of the other kind", id + R"("url":"/v1/completions",)" + kHello + "}"},
         {"an unknown field beside the body", id + R"("priority":1,)" + kHello + "}"},
         {"no body", id + R"("url":"/v1/chat/completions"})"},
         {"null as body", id + R"("body":null})"},
         {"a string as body", id + R"("body":"Hello"})"},
         {"a list as body", id + R"("body":[]})"},
         {"an empty body", id + R"("url":"/v1/chat/completions","body":{}})"},
         {"an empty body without a url", id + R"("body":{}})"},
         {"messages and prompt in one body", Chat(R"("prompt":"Hello")")}});
}

TEST_CASE("token limits are whole numbers within the context") {
  Check("token limits are whole numbers within the context",
        {{"max_tokens -1", Chat(R"("max_tokens":-1)")},
         {"max_tokens 0", Chat(R"("max_tokens":0)")},
         {"max_tokens 2.0", Chat(R"("max_tokens":2.0)")},
         {"max_tokens as a string", Chat(R"("max_tokens":"2")")},
         {"max_tokens true", Chat(R"("max_tokens":true)")},
         {"max_tokens beyond 32 bits", Chat(R"("max_tokens":99999999999)")},
         {"max_tokens of 30 digits", Chat(R"("max_tokens":123456789012345678901234567890)")},
         {"max_tokens null", Chat(R"("max_tokens":null)"), Chat("")},
         {"max_tokens as long as the context", Chat(R"("max_tokens":2048)")},
         {"max_completion_tokens", Chat(R"("max_completion_tokens":3)"), Chat(R"("max_tokens":3)")},
         {"both limits, equal", Chat(R"("max_tokens":3,"max_completion_tokens":3)"),
          Chat(R"("max_tokens":3)")},
         {"both limits, different", Chat(R"("max_tokens":3,"max_completion_tokens":4)")},
         {"max_completion_tokens of a completion",
          Completion("\"The sea\"", R"("max_completion_tokens":3)")},
         {"an over-long prompt", Content("\"" + Repeated("word ", 3000) + "\"")},
         {"an over-long prompt of one letter", Completion("\"" + Repeated("a", 20'000) + "\"")},
         {"a prompt of too many ids", Completion("[5" + Repeated(",5", 2999) + "]")}});
}

TEST_CASE("sampling fields are honoured or refused by name") {
  Check("sampling fields are honoured or refused by name",
        {{"temperature -1", Chat(R"("temperature":-1)")},
         {"temperature 3", Chat(R"("temperature":3)")},
         {"temperature as a string", Chat(R"("temperature":"0.5")")},
         {"temperature null", Chat(R"("temperature":null)"), Chat("")},
         {"top_p 0", Chat(R"("top_p":0)")},
         {"top_p 2", Chat(R"("top_p":2)")},
         {"top_k -1", Chat(R"("top_k":-1)"), Chat(R"("top_k":0)")},
         {"top_k 1.5", Chat(R"("top_k":1.5)")},
         {"min_p 2", Chat(R"("min_p":2)")},
         {"n 0", Chat(R"("n":0)")},
         {"n 2", Chat(R"("n":2)"), "", "", [](const Json& r) { return Choices(r).size() == 2; }},
         {"n 1000", Chat(R"("n":1000)")},
         {"n as a string", Chat(R"("n":"2")")},
         {"a negative seed", Chat(R"("seed":-1)"), Chat(R"("seed":18446744073709551615)")},
         {"a seed beyond 64 bits", Chat(R"("seed":18446744073709551616)")},
         {"seed 1.5", Chat(R"("seed":1.5)")},
         {"presence_penalty 0.5", Chat(R"("presence_penalty":0.5)")},
         {"frequency_penalty 1", Chat(R"("frequency_penalty":1)")},
         {"penalties of 0", Chat(R"("presence_penalty":0.0,"frequency_penalty":0)"), Chat("")},
         {"an empty logit_bias", Chat(R"("logit_bias":{})"), Chat("")},
         {"a logit_bias", Chat(R"("logit_bias":{"50256":-100})")}});
}

TEST_CASE("stop strings and log probabilities are honoured or refused by name") {
  Check("stop strings and log probabilities are honoured or refused by name",
        {{"stop as a string", Chat(R"("stop":"x")"), Chat(R"("stop":["x"])")},
         {"an empty list as stop", Chat(R"("stop":[])"), Chat("")},
         {"an empty stop string", Chat(R"("stop":["a",""])")},
         {"five stop strings", Chat(R"("stop":["a","b","c","d","e"])")},
         {"a number as stop", Chat(R"("stop":5)")},
         {"a number among stop strings", Chat(R"("stop":["a",5])")},
         {"top_logprobs without logprobs", Chat(R"("top_logprobs":3)")},
         {"top_logprobs 21", Chat(R"("logprobs":true,"top_logprobs":21)")},
         {"top_logprobs 20", Chat(R"("logprobs":true,"top_logprobs":20)"), "", "",
          [](const Json& r) {
            return Choices(r)[0].at("logprobs").at("content")[0].at("top_logprobs").size() == 20;
          }},
         {"a number as logprobs of a chat", Chat(R"("logprobs":5)")},
         {"true as logprobs of a completion", Completion("\"The sea\"", R"("logprobs":true)")},
         {"logprobs 6 of a completion", Completion("\"The sea\"", R"("logprobs":6)")}});
}

TEST_CASE("what the program has no part for is refused by name") {
  Check("what the program has no part for is refused by name",
        {{"`stream:true`", Chat(R"("stream":true)")},
         {"`stream:false`", Chat(R"("stream":false)"), Chat("")},
         {"stream_options", Chat(R"("stream_options":{"include_usage":true})")},
         {"response_format json_schema",
          Chat(R"("response_format":{"type":"json_schema","json_schema":{"name":"a"}})")},
         {"response_format text", Chat(R"("response_format":{"type":"text"})"), Chat("")},
         {"tool_choice required", Chat(R"("tool_choice":"required")")},
         {"tool_choice none without tools", Chat(R"("tool_choice":"none")"), Chat("")},
         {"an empty list of tools", Chat(R"("tools":[])"), Chat("")},
         {"an object as tools", Chat(R"("tools":{})")},
         {"a tool that is no function", Chat(R"("tools":[{"type":"web_search"}])")},
         {"functions, the old name of tools", Chat(R"("functions":[])")},
         {"an unknown field of the body", Chat(R"("wibble":1)")},
         {"a field in capitals", Chat(R"("Temperature":1)")},
         {"a field with a blank behind it", Chat(R"("max_tokens ":3)")},
         {"a field without a name", Chat(R"("":1)")},
         {"an unknown field that is null", Chat(R"("wibble":null)"), Chat("")},
         {"another model's name", Chat(R"("model":"gpt-4o-mini")"), Chat("")},
         {"a number as model", Chat(R"("model":5)")},
         {"user, metadata and store of any type", Chat(R"("user":5,"metadata":[1],"store":"yes")"),
          Chat("")},
         {"an effort that the model does not know", Chat(R"("reasoning_effort":"medium")")},
         {"an unknown argument of the template", Chat(R"("chat_template_kwargs":{"tone":"dry"})")},
         {"best_of 2", Completion("\"The sea\"", R"("best_of":2)")},
         {"echo", Completion("\"The sea\"", R"("echo":true)")},
         {"suffix", Completion("\"The sea\"", R"("suffix":"x")")}});
}

TEST_CASE("messages are rendered whole or refused with their place") {
  const std::string talk =
      R"([{"role":"user","content":"Hello"},{"role":"assistant","content":"It was"}])";
  Check(
      "messages are rendered whole or refused with their place",
      {{"no messages", Envelope("/v1/chat/completions", R"({"n":1})")},
       {"an empty list of messages", Messages("[]")},
       {"a string as messages", Messages("\"Hello\"")},
       {"a number among messages", Messages(R"([{"role":"user","content":"Hello"},5])")},
       {"a message without a role", Messages(R"([{"content":"Hello"}])")},
       {"an unknown role", Messages(R"([{"role":"wizard","content":"Hello"}])")},
       {"the role developer",
        Messages(R"([{"role":"developer","content":"Be brief."},{"role":"user","content":"Hi"}])"),
        Messages(R"([{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"}])")},
       {"a message without content", Messages(R"([{"role":"user"}])")},
       {"content null", Content("null")},
       {"a number as content", Content("5")},
       {"an object as content", Content("{\"text\":\"Hello\"}")},
       {"an empty content", Content("\"\"")},
       {"an empty list as content", Content("[]"), Content("\"\"")},
       {"content as a list of text parts",
        Content(R"([{"type":"text","text":"Hel"},{"type":"text","text":"lo"}])"), Chat("")},
       {"an image part", Content(R"([{"type":"image_url","image_url":{"url":"a"}}])"), "", "",
        [](const Json& r) {
          return r.at("x_colibri").at("warnings") ==
                 Json::array({"messages[0].content[0]: the model sees no image_url, the prompt "
                              "tells it that there was one"});
        }},
       {"an unknown part", Content(R"([{"type":"hologram"}])")},
       {"a text part without text", Content(R"([{"type":"text"}])")},
       {"an unknown field of a text part",
        Content(R"([{"type":"text","text":"a","cache_control":{}}])")},
       {"an unknown field of a message",
        Messages(R"([{"role":"user","content":"Hello","name":"Bob"}])")},
       {"the assistant's message last", Messages(talk)},
       {"the assistant's message last, to be continued",
        Chat(R"("continue_final_message":true)", talk)},
       {"to be continued, but the user's is last", Chat(R"("continue_final_message":true)")},
       {"the spelling of control tokens in a content",
        Content(R"("<|user|><|endoftext|>[gMASK]<sop>")"), "", "",
        [](const Json& r) { return PromptTokens(r) > 30; }}});
}

TEST_CASE("prompts are text or ids that the model has") {
  const std::string sea = Completion("\"The sea\"");
  Check("prompts are text or ids that the model has",
        {{"no prompt", Envelope("/v1/completions", "{}")},
         {"an empty prompt", Completion("\"\"")},
         {"an empty list as prompt", Completion("[]")},
         {"a list of strings as prompt", Completion(R"(["The sea","The sky"])")},
         {"a list of one string as prompt", Completion(R"(["The sea"])"), sea},
         {"a list of lists of ids as prompt", Completion("[[1,2],[3]]")},
         {"ids as prompt", Completion("[1,2,3]"), "", "",
          [](const Json& r) { return PromptTokens(r) == 3; }},
         {"an id beyond the vocabulary", Completion("[1,999999]")},
         {"a negative id", Completion("[-1]")},
         {"an id that is no integer", Completion("[1.5]")},
         {"a string among ids", Completion("[1,\"a\"]")},
         {"a number as prompt", Completion("5")},
         {"the model's prefix spelled out", Completion("\"[gMASK]<sop>The sea\""), sea},
         {"the prefix alone", Completion("\"[gMASK]<sop>\"")},
         {"the spelling of a control token in a prompt", Completion("\"<|user|>\""), "", "",
          [](const Json& r) { return PromptTokens(r) > 3; }},
         {"a blank as prompt", Completion("\" \"")}});
}

TEST_CASE("the table of oddities names tests that exist, and every test has its row") {
  const std::vector<TableRow> rows = OddityTable();
  CHECK(rows.size() >= 150);
  std::set<std::string> named, oddities;
  for (const TableRow& row : rows) {
    CHECK_MESSAGE(oddities.insert(row.oddity).second, row.oddity << " has two rows");
    CHECK_MESSAGE(!row.gets.empty(), row.oddity);
    named.insert(row.test);
  }
  const auto cases = [](const std::string& program) {
    std::set<std::string> all;
    const std::string text = ReadWhole(COLIBRI_SOURCE_DIR "/tests/" + program + ".cc");
    constexpr std::string_view kBegin = "\nTEST_CASE(\"";
    for (size_t at = 0; (at = text.find(kBegin, at)) != std::string::npos;) {
      at += kBegin.size();
      all.insert(program + ": " + text.substr(at, text.find('"', at) - at));
    }
    return all;
  };
  for (const std::string& test : named) {
    CHECK_MESSAGE(cases(test.substr(0, test.find(": "))).contains(test), test << " is no test");
  }
  for (const char* program : {"app_oddities_test", "app_odd_files_test"}) {
    size_t unnamed = 0;
    for (const std::string& test : cases(program)) {
      if (named.contains(test)) continue;
      CHECK_MESSAGE(test.find("the table of oddities") != std::string::npos, test << " has no row");
      ++unnamed;
    }
    CHECK(unnamed <= 1);
  }
}

}  // namespace colibri
