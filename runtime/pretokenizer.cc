#include "runtime/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>

#include "runtime/utf8.h"

namespace colibri {
namespace {

// Members of Unicode's White_Space property, as they stand inside a bracketed class.
constexpr std::string_view kWhiteSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Published patterns have a few hundred bytes.
constexpr size_t kMaxPattern = 4096;

class PatternTranslator {
 public:
  explicit PatternTranslator(std::string_view pattern) : pattern_(pattern) {}

  std::string Run() {
    if (pattern_.size() > kMaxPattern) {
      throw std::invalid_argument(fmt::format("the pattern is longer than {} bytes", kMaxPattern));
    }
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        Escape();
      } else if (in_class_) {
        ClassCharacter(c);
      } else {
        Character(c);
      }
    }
    return std::move(out_);
  }

 private:
  char Peek(size_t ahead) const {
    return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : '\0';
  }

  [[noreturn]] void Refuse(std::string_view construct) const {
    throw std::invalid_argument(
        fmt::format("\"{}\" at byte {} of the pattern is not supported", construct, at_ + 1));
  }

  void Copy(size_t count) {
    out_.append(pattern_.substr(at_, count));
    at_ += count;
  }

  void Escape() {
    const char c = Peek(1);
    const bool symbol =
        c > ' ' && c < 0x7F &&
        !((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'));
    if (c == 's' && in_class_) {
      out_.append(kWhiteSpace);
      at_ += 2;
    } else if ((c == 's' || c == 'S') && !in_class_) {
      out_.append(c == 's' ? "[" : "[^").append(kWhiteSpace).append("]");
      at_ += 2;
    } else if (c == 'p' || c == 'P') {
      const size_t end = pattern_.find('}', at_);
      if (Peek(2) != '{' || end == std::string_view::npos) Refuse(pattern_.substr(at_, 2));
      Copy(end + 1 - at_);
    } else if (symbol || c == 'r' || c == 'n' || c == 't' || c == 'f') {
      Copy(2);
    } else {
      Refuse(c == '\0' ? "\\" : pattern_.substr(at_, 2));
    }
    class_start_ = false;
  }

  void ClassCharacter(char c) {
    // Nested classes and intersections belong to the other engine only.
    if (c == '[') Refuse("[ inside a class");
    if (c == '&' && Peek(1) == '&') Refuse("&&");
    if (c == ']' && class_start_) Refuse("[]");
    if (c == ']') in_class_ = false;
    class_start_ = false;
    Copy(1);
  }

  void Character(char c) {
    switch (c) {
      case '[':
        in_class_ = class_start_ = true;
        Copy(Peek(1) == '^' ? 2 : 1);
        return;
      case '(':
        return Group();
      case ')':
        if (const char next = Peek(1); next == '*' || next == '+' || next == '{') {
          Refuse(pattern_.substr(at_, 2));
        }
        return Copy(1);
      case '{':
        if (Peek(1) == ',') Refuse("{,");
        return Copy(1);
      case '}':
        if (Peek(1) == '+') Refuse("}+");
        return Copy(1);
      case '^':
      case '$':
      case '.':
        Refuse(pattern_.substr(at_, 1));
      default:
        return Copy(1);
    }
  }

  void Group() {
    if (Peek(1) != '?') {
      if (Peek(1) == '*') Refuse("(*");
      return Copy(1);
    }
    for (const std::string_view opening : {"(?:", "(?i:", "(?=", "(?!", "(?>"}) {
      if (pattern_.substr(at_, opening.size()) == opening) return Copy(opening.size());
    }
    Refuse(pattern_.substr(at_, 3));
  }

  std::string_view pattern_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
  bool class_start_ = false;  // right behind [ or [^
};

}  // namespace

std::string TranslatePattern(std::string_view pattern) { return PatternTranslator(pattern).Run(); }

struct Pretokenizer::Code {
  pcre2_code* code = nullptr;
  Code() = default;
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  ~Code() { pcre2_code_free(code); }
};

Pretokenizer::Pretokenizer(std::string_view pattern, Jit jit) : code_(std::make_unique<Code>()) {
  const std::string translated = TranslatePattern(pattern);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code_->code == nullptr) {
    PCRE2_UCHAR message[256] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    throw std::invalid_argument(fmt::format("the pattern does not compile: {} (PCRE2 error {})",
                                            reinterpret_cast<const char*>(message), error));
  }
  // Failure means interpretation: slower (3 times), with the same matches.
  if (jit == Jit::kUse) pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);
}

Pretokenizer::~Pretokenizer() = default;
Pretokenizer::Pretokenizer(Pretokenizer&&) noexcept = default;
Pretokenizer& Pretokenizer::operator=(Pretokenizer&&) noexcept = default;

struct PieceSplitter::Match {
  const pcre2_code* code = nullptr;
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;
  explicit Match(const pcre2_code* of)
      : code(of),
        data(pcre2_match_data_create_from_pattern(of, nullptr)),
        context(pcre2_match_context_create(nullptr)) {}
  Match(const Match&) = delete;
  Match& operator=(const Match&) = delete;
  ~Match() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
  }
};

PieceSplitter::PieceSplitter(const Pretokenizer& pretokenizer)
    : match_(std::make_unique<Match>(pretokenizer.code_->code)) {
  if (match_->data == nullptr || match_->context == nullptr) throw std::bad_alloc();
  // The defaults (10 million steps, 20 MB) end a run of 10 MB of spaces without a match. Steps are
  // bounded by the text, since no group repeats.
  pcre2_set_match_limit(match_->context, UINT32_MAX);
  pcre2_set_depth_limit(match_->context, UINT32_MAX);
  pcre2_set_heap_limit(match_->context, UINT32_MAX);
}

PieceSplitter::~PieceSplitter() = default;

void PieceSplitter::Start(std::string_view text) {
  text_ = text;
  given_ = search_ = match_end_ = 0;
}

bool PieceSplitter::Find(size_t* begin, size_t* end) {
  const auto match = [this](uint32_t options) {
    return pcre2_match(match_->code, reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                       search_, options | PCRE2_NO_UTF_CHECK, match_->data, match_->context);
  };
  int found = match(0);
  // The compiled form has a stack of 32 KiB, the interpreter the heap.
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(PCRE2_NO_JIT);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0) throw std::bad_alloc();
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(match_->data);
  *begin = span[0];
  *end = span[1];
  return true;
}

bool PieceSplitter::Next(std::string_view* piece) {
  const auto give = [&](size_t end) {
    *piece = text_.substr(given_, end - given_);
    given_ = end;
    return true;
  };
  if (match_end_ > given_) return give(match_end_);
  while (given_ < text_.size()) {
    size_t begin = 0, end = 0;
    if (search_ >= text_.size() || !Find(&begin, &end)) return give(text_.size());
    if (begin == end) {
      // An empty match cuts the text where it stands; the search goes on one character later.
      search_ = end < text_.size() ? end + FirstSequence(text_.substr(end)).length : end;
      if (begin > given_) return give(begin);
      continue;
    }
    search_ = match_end_ = end;
    return give(begin > given_ ? begin : end);
  }
  return false;
}

}  // namespace colibri
