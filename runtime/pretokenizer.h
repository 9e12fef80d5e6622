// Cutting text into pieces with the pattern of tokenizer.json (model spec 5.1), through PCRE2. The
// pattern is written for another engine: what the two read differently is translated, what cannot
// be is refused. Private to the tokenizer.
// Threads: a Pretokenizer from any thread; a PieceSplitter from one.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace colibri {

// kAvoid: interpret the pattern, as on systems that allow no memory to be executable.
enum class Jit : unsigned char { kUse, kAvoid };

class Pretokenizer {
 public:
  // Throws std::invalid_argument saying what in the pattern is wrong or not supported.
  explicit Pretokenizer(std::string_view pattern, Jit jit = Jit::kUse);
  ~Pretokenizer();
  Pretokenizer(Pretokenizer&&) noexcept;
  Pretokenizer& operator=(Pretokenizer&&) noexcept;

 private:
  friend class PieceSplitter;
  struct Code;
  std::unique_ptr<Code> code_;
};

// Matches and what lies between them, in order; together they are the whole text.
class PieceSplitter {
 public:
  // `pretokenizer` must outlive it.
  explicit PieceSplitter(const Pretokenizer& pretokenizer);
  ~PieceSplitter();
  PieceSplitter(const PieceSplitter&) = delete;
  PieceSplitter& operator=(const PieceSplitter&) = delete;

  // `text` is valid UTF-8 and stays where it is until the last Next().
  void Start(std::string_view text);
  // False at the end. Throws std::bad_alloc only: no match limit applies.
  bool Next(std::string_view* piece);

 private:
  struct Match;
  // The next match at or behind `search_`; false if there is none.
  bool Find(size_t* begin, size_t* end);

  std::unique_ptr<Match> match_;
  std::string_view text_;
  size_t given_ = 0;      // bytes of the text already given out
  size_t search_ = 0;     // where the next search begins
  size_t match_end_ = 0;  // end of a match found but held back for the gap before it
};

// The pattern as PCRE2 must be given it: \s and \S spelled out as Unicode's White_Space (PCRE2's
// own has U+180E besides). Throws std::invalid_argument for constructs that the two engines read
// differently and for repeated groups, whose matching time may be exponential.
std::string TranslatePattern(std::string_view pattern);

}  // namespace colibri
